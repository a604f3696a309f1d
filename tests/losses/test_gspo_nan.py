"""How verl's `gspo` turns NaN (its `cispo` too, by the first of these), and that ours does not.

verl multiplies weights, advantages and losses by the mask, and NaN x 0 is NaN: a weight or an advantage that is not
finite on a token that does not even count is enough. verl's own step makes such weights: a masked token (a tool's) that
both engines hold impossible has log-ratio -inf - -inf. By a log-prob that is not finite the loss is NaN, and the
gradient of the whole response silently 0: the derivative of torch's clamp at NaN is 0, and nothing counts it.
"""

import pytest
import torch
from composer import actor_config
from loss_calls import call, composed
from plain_equations import random_case
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights


@pytest.fixture
def case():
    case = random_case(5, responses=6, spread=2e-3).to(torch.float32)
    for tensor in (case.trainer, case.proximal, case.rollout):
        tensor[~case.mask] = -1.0
    return case


@pytest.fixture
def masked(case) -> tuple[int, int]:
    """A token that does not count, in a response that has some that do."""
    return tuple((~case.mask & case.mask.any(dim=-1, keepdim=True)).nonzero()[0].tolist())


def both(case, loss="gspo", trainer=None, advantages=None, weights=None):
    """Return loss and gradient of verl's gspo (or cispo) and of ours."""
    known = {"dp_size": 1, "batch_num_tokens": int(case.mask.sum()), "global_batch_size": len(case.mask)}
    config = actor_config(composed(loss), **known)
    advantages, found = case.advantages_BT if advantages is None else advantages, []
    for name in (loss, f"vp_{loss}"):
        leaf = (case.trainer if trainer is None else trainer).clone().requires_grad_()
        value, _ = call(name, config, case.proximal, leaf, advantages, case.mask, weights)
        value.backward()
        found.append((value.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_weight_of_a_masked_token_that_is_impossible(loss, case, masked):
    """Through verl's own token-level weights: their gradient is NaN, ours is as if the token were not there."""
    log_ratio = case.proximal - case.rollout
    clean, _ = compute_rollout_correction_weights(log_ratio, case.mask, "token", 2.0)
    log_ratio[masked] = torch.tensor(-torch.inf) - torch.tensor(-torch.inf)
    weights, _ = compute_rollout_correction_weights(log_ratio, case.mask, "token", 2.0)
    assert weights[masked].isnan(), "verl's step"
    theirs, ours = both(case, loss, weights=weights)
    assert theirs[1].isnan().any()
    assert all(map(torch.equal, ours, both(case, loss, weights=clean)[1]))


@pytest.mark.parametrize(
    ("tensor", "junk"), [("advantages", torch.nan), ("advantages", torch.inf), ("trainer", -torch.inf)]
)
def test_advantage_and_log_prob_of_a_masked_token(tensor, junk, case, masked):
    """Of the log-prob verl loses the whole response, loss NaN, without a word; for ours the token is not there."""
    clean, row = both(case)[1], masked[0]
    assert clean[1][row].any()
    changed = {"advantages": case.advantages_BT, "trainer": case.trainer}[tensor].clone()
    changed[masked] = junk
    theirs, ours = both(case, **{tensor: changed})
    assert theirs[0].isnan()
    assert theirs[1].isnan().any() if tensor == "advantages" else not theirs[1][row].any()
    assert all(map(torch.equal, ours, clean))


def test_valid_token_of_probability_zero(case):
    case.trainer[2, 0] = -torch.inf
    theirs, ours = both(case)
    assert case.mask[2, 0] and theirs[0].isnan() and ours[0].isfinite() and not ours[1][2].any()
