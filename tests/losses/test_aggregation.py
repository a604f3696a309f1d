"""Dr.GRPO's aggregation and the other modes: by hand, against verl where verl is right, and where it is not."""

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

from verl_precision.base.errors import ConfigurationError
from verl_precision.losses.aggregation import MODES, NORM_MODE, Aggregation, aggregate

VALUES = torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
# Sums of rows 3 and 12, of lengths 2 and 3; C_norm = 6.
BY_HAND = {
    NORM_MODE: (3 + 12) / 2 / 6,
    "seq-mean-token-sum": (3 + 12) / 2,
    "seq-mean-token-mean": (3 / 2 + 12 / 3) / 2,
    "token-mean": (3 + 12) / 5,
    "token-sum": 3 + 12,
}


@pytest.mark.parametrize("mode", MODES)
def test_by_hand_and_verls_where_verl_is_given_all_constants(mode):
    assert aggregate(VALUES, MASK, Aggregation(mode, normalizer=6)).item() == pytest.approx(BY_HAND[mode], rel=1e-15)
    theirs = agg_loss(VALUES, MASK, mode, dp_size=4, batch_num_tokens=50, global_batch_size=20, loss_scale_factor=6)
    ours = aggregate(VALUES, MASK, Aggregation(mode, normalizer=6, num_responses=20, num_tokens=50, dp_size=4))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-7)


def test_rejected_response_stays_in_the_denominator():
    """verl without global information divides by the responses that have tokens left: 1 instead of 2."""
    rejected = MASK * torch.tensor([[1], [0]])
    assert aggregate(VALUES, rejected, Aggregation(normalizer=6)).item() == pytest.approx(3 / 2 / 6)
    assert agg_loss(VALUES, rejected, NORM_MODE, loss_scale_factor=6).item() == pytest.approx(3 / 1 / 6)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_and_empty_rows_never_matter(mode):
    values = VALUES.clone().requires_grad_()
    mask = torch.tensor([[0, 0, 0], [1, 0, 1]])
    junk = torch.where(mask.bool(), values, torch.nan)
    aggregate(junk, mask, Aggregation(mode, normalizer=6)).backward()
    assert values.grad.isfinite().all() and not values.grad[~mask.bool()].any()
    assert aggregate(junk, mask * 0, Aggregation(mode, normalizer=6)) == 0


@pytest.mark.parametrize(("settings", "message"), [
    ({"mode": "token-average"}, "^mode='token-average'"),
    ({}, "^normalizer=None.*Pass Aggregation"),
    *(({"normalizer": value}, f"^normalizer={value!r}") for value in (0, -3, "512", float("nan"))),
    ({"normalizer": 6, "dp_size": 0}, "dp_size=0"),
    ({"normalizer": 6, "num_responses": 0}, "num_responses=0"),
    ({"normalizer": 6, "dp_size": 2}, "num_responses=None: with dp_size=2"),
    ({"mode": "token-mean", "dp_size": 2, "num_responses": 3}, "num_tokens=None: with dp_size=2"),
])  # fmt: skip
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        Aggregation(**settings)
    assert error.value.allowed and error.value.remedy and "actor_rollout_ref" not in str(error.value)


def test_wrong_shapes_are_refused():
    with pytest.raises(ConfigurationError, match=r"values have shape \(2, 3\), the mask \(2, 2\)"):
        aggregate(VALUES, MASK[:, :2], Aggregation(normalizer=6))
