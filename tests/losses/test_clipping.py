"""What each loss states about its ratio is what it does: ours and verl's, by their gradients."""

import math

import pytest
import torch
from composer import actor_config
from loss_calls import call, composed
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from verl_precision.losses import POLICY_LOSSES
from verl_precision.losses.registry import ratio_of
from verl_precision.losses.settings import NO_RATIO, VERLS_RATIOS, ClipRange, Ratio, clip_range

# These take gradients away by other rules than a clip range: a divergence, and C.
OTHER_RULES = {"dppo_tv", "dppo_kl", "vp_dppo_tv", "vp_dppo_kl", "vp_pg_seq_mis"}


def test_every_registered_loss_has_stated_its_ratio():
    assert set(POLICY_LOSS_REGISTRY) == {*POLICY_LOSSES, *VERLS_RATIOS}
    # other tests register losses of their own, without a statement, in the same process
    ours = [entry for entry in POLICY_LOSSES.values() if entry.function.__module__.startswith("verl_precision.")]
    assert len(ours) >= 8 and all(entry.ratio is not None for entry in ours)


@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES, *VERLS_RATIOS}))
def test_a_token_has_no_gradient_exactly_where_the_statement_says(name):
    """The log-ratio of a token has a spread of 0.7, so that a third of them are beyond the range.

    Every loss can run in this config: verl's clip range of 0.2 both ways, and the block of bypass mode.
    """
    whole = composed("pg_seq_mis").copy()
    actor_node = whole.actor_rollout_ref.actor
    penalty = {"dro_beta": 0.1} if name == "dro" else {}  # which gives clipped tokens a gradient
    OmegaConf.update(actor_node, "policy_loss", {"loss_mode": name, **penalty})
    OmegaConf.update(actor_node, "policy_loss.rollout_correction.rollout_rs_threshold", 9.0, force_add=True)  # δ, never
    clip = clip_range(ratio_of(actor_node), actor_node)
    generator = torch.Generator().manual_seed(3)
    old = torch.full((400, 2), -1.0, dtype=torch.float64)
    trainer = (old + 0.7 * torch.randn(old.shape, generator=generator)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0]).repeat(200).unsqueeze(-1).expand(400, 2).double()
    mask = torch.ones(400, 2, dtype=torch.bool)
    actor = actor_config(whole, dp_size=1, batch_num_tokens=800, global_batch_size=400)
    call(name, actor, old, trainer, advantages, mask, mode="token-mean")[0].backward()
    silenced = trainer.grad == 0
    if clip is None:
        assert name in OTHER_RULES or not silenced.any()
        return
    log_ratio = (trainer - old).detach()
    if clip.sequence:
        log_ratio = log_ratio.mean(dim=-1, keepdim=True)
    beyond = (log_ratio < clip.low) | (log_ratio > clip.dual)
    expected = ((advantages > 0) & (log_ratio > clip.high)) | ((advantages < 0) & beyond)
    assert 0 < expected.sum() < 800 and torch.equal(silenced, expected)


def test_the_range_is_that_of_the_config():
    ppo = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28}
    assert clip_range(Ratio("token", "ratio"), ppo) == ClipRange(False, math.log1p(-0.2), math.log1p(0.28))
    assert clip_range(Ratio("token", "dual"), {**ppo, "clip_ratio_c": 5.0}).dual == math.log(5)
    assert clip_range(Ratio("sequence", "log"), ppo) == ClipRange(True, -0.2, 0.28)
    assert clip_range(Ratio("token", "ratio"), {**ppo, "clip_ratio_low": 10.0}).low == -math.inf, "never below 0"
    assert clip_range(Ratio("token"), ppo) is None


def test_the_ratio_of_a_config():
    assert ratio_of({}) == VERLS_RATIOS["vanilla"], "verl's default"
    assert ratio_of({"policy_loss": {"loss_mode": "vp_grpo"}}) == Ratio("token", "ratio")
    reinforce = {"loss_mode": "bypass_mode", "rollout_correction": {"loss_type": "reinforce"}}
    assert ratio_of({"policy_loss": reinforce}) == NO_RATIO
    assert ratio_of({"policy_loss": {"loss_mode": "somebody's"}}) is None
