"""What verl's rollout-correction step hands to the loss is equations (9) and (10); its own levels are not."""

import math

import pytest
import torch
from conftest import composed, corrected
from plain_equations import random_case

from verl_precision.errors import ConfigurationError

SMALL = -30.0  # log ρ below verl's bound of -20
ONE = torch.ones(1, 1, dtype=torch.bool)


def through_verl(log_ratio: torch.Tensor, mask: torch.Tensor, level: str, threshold, **settings):
    settings = {"rollout_is": level, "rollout_is_threshold": threshold, **settings}
    return corrected(log_ratio, torch.zeros_like(log_ratio), mask, **settings)


@pytest.fixture
def batch():
    """Log-ratios, one of them extreme, and their mask."""
    case = random_case(2)
    log_ratio = torch.where(case.mask, case.proximal - case.rollout, 0)
    log_ratio[2, 0] = SMALL
    assert case.mask[2, 0]
    return log_ratio, case.mask


@pytest.mark.parametrize("estimator", ["grpo_token_tis", "grpo_seq_mis"])
def test_what_arrives_is_the_equation(estimator, batch):
    correction = composed(estimator).algorithm.rollout_correction
    log_ratio, mask = batch
    found, new_mask, metrics = through_verl(*batch, correction.rollout_is, correction.rollout_is_threshold)
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


@pytest.mark.parametrize(("level", "threshold"), [("token", 2.0), ("sequence", "1e-9_3.0")])
def test_verls_own_levels_have_a_floor(level, threshold):
    """Why ours exist: asked for e^-30, verl's weight is e^-20."""
    weight, _, _ = through_verl(torch.full((1, 1), SMALL, dtype=torch.float64), ONE, level, threshold)
    assert weight.item() == pytest.approx(math.exp(-20))


def test_verls_own_rejection_is_inverted_and_leaves_the_denominator():
    ratio_4 = torch.tensor([[math.log(4.0)]], dtype=torch.float64)
    rejection = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_5.0"}
    _, kept, _ = through_verl(ratio_4, ONE, "sequence", 10.0, **rejection)
    assert not kept.any(), "rejected though inside 0.5 .. 5, and gone from the mask"


@pytest.mark.parametrize("settings", [("token", 2.0), ("sequence", "0.5_5.0", True)])
def test_verls_own_levels_pass_through_unchanged(settings, batch):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights as wrapped

    ours, theirs = wrapped(*batch, *settings), wrapped.__wrapped__(*batch, *settings)
    assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]


@pytest.mark.parametrize("level", ["vp_token_tis", "vp_seq_mis"])
def test_nonfinite_response_is_counted_and_left_out(level, batch):
    log_ratio, mask = batch
    log_ratio[2, 1], mask[2, 1] = torch.nan, True
    weights, _, metrics = through_verl(log_ratio, mask, level, 3.0)
    assert weights[2][mask[2]].isnan().all(), "`grpo` leaves this response out and counts it"
    assert metrics["rollout_corr/rollout_is_nonfinite_responses"] == 1
    assert math.isfinite(metrics["rollout_corr/rollout_is_mean"])


def test_a_response_whose_ratio_underflows_is_not_beyond_c():
    """s = -120: the weight is 0 in float32, as that of a rejected response is."""
    log_ratio = torch.tensor([[-120.0], [5.0], [0.0], [0.0]])
    weights, _, metrics = through_verl(log_ratio, torch.ones(4, 1, dtype=torch.bool), "vp_seq_mis", 3.0)
    assert weights.flatten().tolist() == [0, 0, 1, 1] and metrics["rollout_corr/rollout_is_beyond_fraction"] == 0.25


def test_bad_threshold_in_verls_step():
    with pytest.raises(ConfigurationError) as error:
        through_verl(torch.zeros(1, 1), ONE, "vp_seq_mis", 0.5)
    assert error.value.setting == "algorithm.rollout_correction.rollout_is_threshold"


def test_normalised_weights_are_refused():
    with pytest.raises(ConfigurationError, match="rollout_is_batch_normalize=True"):
        through_verl(torch.zeros(1, 1), ONE, "vp_seq_mis", 3.0, rollout_is_batch_normalize=True)
