"""What verl's rollout-correction step hands to the loss is equations (9) and (10); its own levels are not."""

import math

import pytest
import torch
from conftest import composed
from plain_equations import random_case

from verl_precision.errors import ConfigurationError

SMALL = -30.0  # log ρ below verl's bound of -20


def through_verl(rollout_is: str, threshold, log_ratio: torch.Tensor, mask: torch.Tensor, **settings):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    proto, new_mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_ratio,
        rollout_log_prob=torch.zeros_like(log_ratio),
        response_mask=mask,
        rollout_is=rollout_is,
        rollout_is_threshold=threshold,
        **settings,
    )
    return proto.batch["rollout_is_weights"], new_mask, metrics


def batch_with_extremes():
    case = random_case(2)
    log_ratio = torch.where(case.mask, case.proximal - case.rollout, 0)
    log_ratio[2, 0] = SMALL
    assert case.mask[2, 0]
    return log_ratio, case.mask


@pytest.mark.parametrize("estimator", ["grpo_token_tis", "grpo_seq_mis"])
def test_what_arrives_is_the_equation(estimator):
    correction = composed(estimator).algorithm.rollout_correction
    log_ratio, mask = batch_with_extremes()
    found, new_mask, metrics = through_verl(correction.rollout_is, correction.rollout_is_threshold, log_ratio, mask)
    if estimator == "grpo_token_tis":
        expected = torch.where(mask, log_ratio.exp().clamp(max=2.0), 0)
    else:
        rho = torch.where(mask, log_ratio, 0).sum(dim=-1, keepdim=True).exp()
        expected = torch.where(mask & (rho <= 3.0), rho, 0)
        rejected = (rho > 3.0).squeeze(1)
        assert rejected.any() and mask[rejected].any(dim=-1).all(), "rejected responses are there, and keep their mask"
    assert torch.equal(new_mask, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert metrics["rollout_corr/rollout_is_nonfinite_responses"] == 0
    assert 0 < metrics["rollout_corr/rollout_is_beyond_fraction"] < 1


def test_verls_own_levels_are_not_the_equations():
    """Why ours exist: the floor e^-20, k1 bounds that are inverted, rejection that leaves the denominator."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    log_ratio = torch.full((1, 1), SMALL, dtype=torch.float64)
    for level, threshold in (("token", 2.0), ("sequence", "1e-9_3.0")):
        weight, _, _ = through_verl(level, threshold, log_ratio, mask)
        assert weight.item() == pytest.approx(math.exp(-20)), "asked for e^-30"
    r = torch.tensor([[math.log(4.0)]], dtype=torch.float64)  # ratio 4: inside 0.5 .. 5
    _, kept, _ = through_verl("sequence", 10.0, r, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_5.0")
    assert not kept.any(), "rejected by the inverted bound, and gone from the mask"


def test_verls_own_levels_pass_through_unchanged():
    from verl.trainer.ppo import rollout_corr_helper

    log_ratio, mask = batch_with_extremes()
    wrapped = rollout_corr_helper.compute_rollout_correction_weights
    for arguments in ((log_ratio, mask, "token", 2.0), (log_ratio, mask, "sequence", "0.5_5.0", True)):
        ours, theirs = wrapped(*arguments), wrapped.__wrapped__(*arguments)
        assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]


def test_nonfinite_response_is_counted_and_left_out():
    log_ratio, mask = batch_with_extremes()
    log_ratio[2, 1] = torch.nan
    mask[2, 1] = True
    weights, _, metrics = through_verl("vp_seq_mis", 3.0, log_ratio, mask)
    assert weights[2][mask[2]].isnan().all(), "`grpo` leaves this response out and counts it"
    assert metrics["rollout_corr/rollout_is_nonfinite_responses"] == 1
    assert math.isfinite(metrics["rollout_corr/rollout_is_mean"])


@pytest.mark.parametrize("threshold", [0, -1.0, "0.5_5", 0.55, None])
def test_bad_threshold_in_verls_step(threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    with pytest.raises(ConfigurationError, match=r"algorithm\.rollout_correction\.rollout_is_threshold="):
        compute_rollout_correction_weights(torch.zeros(1, 1), torch.ones(1, 1), "vp_seq_mis", threshold)


def test_normalised_weights_are_refused():
    with pytest.raises(ConfigurationError, match="rollout_is_batch_normalize=True"):
        through_verl("vp_seq_mis", 3.0, torch.zeros(1, 1), torch.ones(1, 1), rollout_is_batch_normalize=True)
