"""What the series for verl 0.6.1 promises, run by test_releases.py in a process whose verl is the tree.

Every test here fails in the release and passes with the series. Oracles are written plainly, in float64, from the
equations.
"""

import math

import pytest
import torch
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as correct_batch
from verl.workers.config import FSDPActorConfig, PolicyLossConfig


def actor_config(**settings):
    needed = {"strategy": "fsdp", "rollout_n": 1, "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2}
    return FSDPActorConfig(**{**needed, "use_torch_compile": False, **settings})


def compose_ppo(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


# Patch 0001
@pytest.mark.parametrize("cut", [[4], [2, 2], [1, 1, 1, 1], [3, 1]])
def test_aggregation_is_dr_grpo_however_the_mini_batch_is_cut(cut):
    """(1/N) Σ_b Σ_t loss_bt / T, from micro-batches weighed by their share of rows as the actor weighs them."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < torch.tensor([[6], [2], [0], [4]])).double()  # one response has no token
    oracle = sum(losses[b, t] * mask[b, t] for b in range(4) for t in range(6)) / 4 / 6
    parts = zip(losses.split(cut), mask.split(cut), strict=True)
    total = sum(agg_loss(part, valid, "seq-mean-token-sum-norm") * len(part) / 4 for part, valid in parts)
    if cut != [1, 1, 1, 1]:  # with one row each, sum and mean agree: the release is right by accident
        torch.testing.assert_close(total, oracle)
    wider = agg_loss(torch.cat([losses, losses]), torch.cat([mask, mask]), "seq-mean-token-sum-norm")
    torch.testing.assert_close(wider, oracle)  # twice the same responses: the same mean


# Patch 0006
C = 3.0
# log-ratio of each response as a whole: far below, at, just within and just above C, and beyond what exp can hold
SEQUENCE_LOG_RATIOS = [-500.0, -2.0, 0.0, math.log(C) - 1e-3, math.log(C) + 1e-3, 20.0, 500.0]


def weight(estimator, log_ratio):
    """ρ (5), min(ρ, C) (6), ρ 1{ρ ≤ C} (7), of arXiv 2510.26788."""
    if estimator == "pg_seq_is":
        return math.exp(log_ratio)
    if estimator == "pg_seq_tis":
        return math.exp(min(log_ratio, math.log(C)))
    return math.exp(log_ratio) if log_ratio <= math.log(C) else 0.0


def policy_gradient(estimator, trainer, rollout, advantages, mask, threshold=C):
    config = actor_config(policy_loss=PolicyLossConfig(loss_mode=estimator, rollout_is_threshold=threshold))
    trainer = trainer.clone().requires_grad_()
    batch = {"old_log_prob": rollout, "log_prob": trainer, "advantages": advantages, "response_mask": mask}
    loss, _ = get_policy_loss_fn(estimator)(**batch, loss_agg_mode="seq-mean-token-sum-norm", config=config)
    loss.backward()
    return trainer.grad


@pytest.mark.parametrize("estimator", ["pg_seq_is", "pg_seq_tis", "pg_seq_mis"])
def test_gradient_is_the_equation(estimator):
    log_ratios = [r for r in SEQUENCE_LOG_RATIOS if estimator != "pg_seq_is" or r < 60]
    rows, width = len(log_ratios), 4
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(rows, width)
    mask[0, 3:] = 0
    trainer = -torch.rand(rows, width, generator=generator) * 5
    rollout = trainer.double() - torch.tensor(log_ratios).double().unsqueeze(-1) * mask / mask.sum(-1, keepdim=True)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).clone()
    masked = mask == 0
    trainer[masked], rollout[masked], advantages[masked] = torch.nan, torch.inf, torch.nan  # must not matter
    gradient = policy_gradient(estimator, trainer.double(), rollout, advantages.double(), mask.double())
    weights = torch.tensor([[weight(estimator, log_ratio)] for log_ratio in log_ratios], dtype=torch.float64)
    wanted = torch.where(masked, 0.0, -weights * advantages / rows / width)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0.0)


# Patch 0007
def test_one_sided_masking_is_the_equation_and_keeps_the_response_in_the_denominator():
    log_ratios = [r for r in SEQUENCE_LOG_RATIOS if r > -19]  # the release holds log-ratios at -20
    mask = torch.ones(len(log_ratios), 2)
    rollout = -mask - torch.tensor(log_ratios).unsqueeze(-1) * torch.tensor([[0.25, 0.75]])
    tensors = {"old_log_probs": -mask, "rollout_log_probs": rollout, "response_mask": mask.clone()}
    settings = ("rollout_is=sequence", f"rollout_is_threshold={C}", "rollout_is_mode=mask")
    config = compose_ppo(*(f"algorithm.rollout_correction.{setting}" for setting in settings))
    batch, metrics = correct_batch(DataProto.from_dict(tensors=tensors), config.algorithm.rollout_correction)
    wanted = [[weight("pg_seq_mis", log_ratio)] * 2 for log_ratio in log_ratios]
    torch.testing.assert_close(batch.batch["rollout_is_weights"], torch.tensor(wanted), rtol=1e-5, atol=1e-12)
    assert torch.equal(batch.batch["response_mask"], mask)
    assert metrics["rollout_corr/rollout_is_masked_fraction"] == pytest.approx(3 / len(log_ratios))


# Patch 0008
def test_mismatch_metrics_are_their_formulas():
    from verl.trainer.ppo.mismatch_metrics import compute_mismatch_metrics

    nan = math.nan
    trainer = torch.tensor([[-1.0, -2.0, nan], [-0.5, nan, nan], [nan, nan, nan]])
    rollout = torch.tensor([[-1.5, -1.0, nan], [-0.5, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    wanted = {"log_prob_gap_abs_mean": 0.5, "log_prob_gap_abs_max": 1.0, "seq_log_ratio_max": 0.0}
    wanted |= {"seq_log_ratio_min": -0.5, "k3_kl": sum(math.exp(d) - d - 1 for d in (0.5, -1.0, 0.0)) / 3}
    wanted |= {"prob_gap_max": math.exp(-1.0) - math.exp(-1.5), "prob_gap_min": math.exp(-2.0) - math.exp(-1.0)}
    metrics = compute_mismatch_metrics(trainer, rollout, mask)
    assert metrics == pytest.approx({f"mismatch/{name}": value for name, value in wanted.items()})
    assert compute_mismatch_metrics(trainer, rollout, torch.zeros(3, 3)) == {}
