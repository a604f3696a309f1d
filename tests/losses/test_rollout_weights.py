"""What verl's rollout-correction step hands to the loss: our levels, and which of its own are what they say."""

import math

import pytest
import torch
from loss_calls import corrected, loss_through_verl
from plain_equations import random_case
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights as wrapped

from verl_precision.base.errors import ConfigurationError

SMALL = -30.0  # log ρ below verl's bound of -20
ONE = torch.ones(1, 1, dtype=torch.bool)
ICEPOP = ("vp_icepop", "0.5_5.0")


def through_verl(log_ratio: torch.Tensor, mask: torch.Tensor, level: str, threshold, **settings):
    settings = {"rollout_is": level, "rollout_is_threshold": threshold, **settings}
    return corrected(log_ratio, torch.zeros_like(log_ratio), mask, **settings)


def kept_by_verl(log_ratio: torch.Tensor, mask: torch.Tensor, rejection: str, threshold) -> torch.Tensor:
    return through_verl(log_ratio, mask, None, None, rollout_rs=rejection, rollout_rs_threshold=threshold)[1].bool()


@pytest.fixture
def batch():
    """Log-ratios, one of them extreme, and their mask."""
    case = random_case(2)
    log_ratio = torch.where(case.mask, case.proximal - case.rollout, 0)
    log_ratio[2, 0] = SMALL
    assert case.mask[2, 0]
    return log_ratio, case.mask


@pytest.mark.parametrize(("level", "threshold"), [("token", 2.0), ("sequence", "1e-9_3.0")])
def test_verls_own_levels_have_a_floor(level, threshold):
    """Why ours exist: asked for e^-30, verl's weight is e^-20."""
    small, ours = torch.full((1, 1), SMALL, dtype=torch.float64), {"token": "vp_token_tis", "sequence": "vp_seq_mis"}
    assert through_verl(small, ONE, level, threshold)[0].item() == pytest.approx(math.exp(-20))
    assert through_verl(small, ONE, ours[level], 3.0)[0].item() == pytest.approx(math.exp(SMALL), rel=1e-12)


def test_the_geometric_mask_keeps_the_band_that_is_asked_for():
    """Ratios 0.6, 1.5 and 1.9 of one token, then a long response whose product is 2^4 and whose mean is 2^0.5.

    Of [0.8, 1.6], verl's seq_mean_k1 keeps [1/1.6, 1/0.8].
    """
    log_ratio = torch.zeros(4, 8, dtype=torch.float64)
    log_ratio[:3, 0] = torch.tensor([0.6, 1.5, 1.9]).log()
    log_ratio[3] = math.log(2) / 2
    mask = log_ratio != 0
    weights, kept_by_ours, metrics = through_verl(log_ratio, mask, "vp_geo_mask", "0.8_1.6")
    assert weights.amax(dim=-1).tolist() == [0, 1, 0, 1] and torch.equal(kept_by_ours, mask)
    assert metrics["rollout_corr/rollout_is_beyond_fraction"] == 0.5
    assert not kept_by_verl(log_ratio, mask, "seq_mean_k1", "0.8_1.6").any(), "1/1.6 .. 1/0.8, and out of the mask"


@pytest.mark.parametrize(("rejection", "limit"), [("seq_max_k2", 42.4), ("seq_max_k3", 0.3)])
def test_verls_own_k2_and_k3_reject_what_they_say(rejection, limit, batch):
    """So they need no replacement: `trm` is seq_max_k3, and seq_max_k2 at 42.4 is a veto of ratios beyond 10^4."""
    log_ratio, mask = batch
    log_ratio[2, 0] = -9.3  # a ratio of 1/11000
    divergence = mask * (log_ratio**2 / 2 if rejection.endswith("k2") else log_ratio.exp() - 1 - log_ratio)
    expected = mask & (divergence.amax(-1, True) <= limit)
    assert torch.equal(kept_by_verl(*batch, rejection, limit), expected) and not torch.equal(expected, mask)


def test_kpop_drops_a_token_that_one_policy_is_certain_of_and_holds_a_ratio_that_overflows():
    trainer, rollout = torch.tensor([[0.0, -0.5, -11.0]]), torch.tensor([[-0.5, 0.0, -110.0]])
    weights, _, _ = corrected(trainer, rollout, ONE.expand(1, 3), rollout_is="vp_kpop", rollout_is_threshold=0.1)
    assert weights[0, :2].tolist() == [0, 0] and 1e11 < weights[0, 2] < 1e12


@pytest.mark.parametrize("broken", ["trainer", "rollout", "neither"])
@pytest.mark.parametrize("estimator", ["icepop", "kpop"])
def test_a_batch_in_which_no_weight_is_left_is_a_gradient_of_zero(estimator, broken):
    """T3: all of π or of μ is NaN, as a broken FP16 forward makes it, or no token is within the band."""
    case = random_case(4)
    {"trainer": case.proximal, "rollout": case.rollout, "neither": torch.zeros(1)}[broken][:] = torch.nan
    case.proximal.sub_(9.0)
    case.rollout.add_(2.5)
    trainer = case.trainer.clone().requires_grad_()
    loss, metrics = loss_through_verl(estimator, case, trainer)
    (gradient,) = torch.autograd.grad(loss, trainer)
    assert loss.item() == 0 and not gradient.any()
    rows = int(case.mask.any(dim=-1).sum())
    assert metrics["actor/nonfinite_responses"].aggregate() == (0 if broken == "neither" else rows)
    assert broken != "neither" or metrics["actor/is_weight_ess_fraction"].aggregate() == 0


def test_verls_own_band_without_a_token_in_it_divides_by_zero():
    """Why icepop has a level of ours: the division is that of a metric."""
    with pytest.raises(ZeroDivisionError):
        through_verl(torch.full((1, 1), 3.0), ONE, "token", "0.5_5.0")


@pytest.mark.parametrize("settings", [("token", 2.0), ("sequence", "0.5_5.0", True)])
def test_verls_own_levels_pass_through_unchanged(settings, batch):
    ours, theirs = wrapped(*batch, *settings), wrapped.__wrapped__(*batch, *settings)
    assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]


@pytest.mark.parametrize("settings", [
    ("vp_token_tis", 3.0), ("vp_seq_mis", 3.0), ("vp_geo_mask", "0.9_1.1"), ICEPOP, ("vp_kpop", 0.1)
])  # fmt: skip
def test_nonfinite_response_is_counted_and_left_out(settings, batch):
    log_ratio, mask = batch
    log_ratio[2, 1], mask[2, 1] = torch.nan, True
    weights, _, metrics = through_verl(*batch, *settings)
    assert weights[2][mask[2]].isnan().all(), "`grpo` leaves this response out and counts it"
    assert metrics["rollout_corr/rollout_is_nonfinite_responses"] == 1
    assert math.isfinite(metrics["rollout_corr/rollout_is_mean"])


@pytest.mark.parametrize(("level", "threshold", "normalised"), [
    ("vp_icepop", 0.55, False), ("vp_kpop", 0.0, False), ("vp_kpop", "0.1", False), ("vp_seq_mis", 0.5, False),
    *(("vp_geo_mask", threshold, False) for threshold in (0.55, "1.001", "1.1_1.2")), ("vp_seq_mis", 3.0, True),
])  # fmt: skip
def test_what_verls_step_cannot_do_is_refused(level, threshold, normalised):
    with pytest.raises(ConfigurationError) as error:
        through_verl(torch.zeros(1, 1), ONE, level, threshold, rollout_is_batch_normalize=normalised)
    setting = "rollout_is_batch_normalize" if normalised else "rollout_is_threshold"
    assert error.value.setting == f"algorithm.rollout_correction.{setting}"
