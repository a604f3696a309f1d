"""Importance-weighted policy gradient: the paper's equations (5), (6), (7).

The response is drawn from the rollout's policy μ(θ'), but the gradient must be that of π(θ). One weight for the whole
response, ρ = π(y; θ) / μ(y; θ'), corrects for the difference, whatever its cause: precision, engine or staleness.
Only π and μ are needed, so verl's old-log-prob forward is not run.

Source of all three: https://arxiv.org/abs/2510.26788, section 2.1.
"""

import torch
from torch import Tensor

from verl_precision.losses import metrics as reported
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import Batch, bounded_, bounded_exp, checked_batch, loss_with_slope
from verl_precision.losses.registry import policy_loss
from verl_precision.losses.settings import Ratio, require_threshold


@policy_loss("vp_pg_seq_is", "importance weight of the response", "arXiv 2510.26788 eq. (5)", Ratio("sequence"))
def pg_seq_is(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation,
) -> LossOutput:  # fmt: skip
    """Policy gradient with the full importance weight of the response.

        ∇J = ρ ∇log π(y) A,   ρ = exp(Σₜ log π(yₜ; θ) - log μ(yₜ; θ'))

    π trainer's policy, μ rollout's policy, A advantage. Equation (5) of https://arxiv.org/abs/2510.26788. Unbiased; its
    variance grows with the mismatch, so it is for matched precisions (FP16 on both sides).

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`, with ρA as the objective, and
    `rollout_log_probs`, [B, T] floating, log μ(yₜ; θ') in nats. The advantage is constant over a response in the
    equation. ρ is a constant in the gradient (exact, since ∇ρ = ρ ∇log π). It is held at 2e11 in float32, beyond a
    log-ratio of 25.9, and `actor/held_tokens` counts its tokens.
    """
    batch = checked_batch(trainer_log_probs, rollout_log_probs, advantages, response_mask, other="rollout_log_probs")
    return _policy_gradient(batch, bounded_exp(batch.sequence_log_ratio_B, batch.dtype), aggregation)


@policy_loss("vp_pg_seq_tis", "the same weight, truncated at C", "arXiv 2510.26788 eq. (6)", Ratio("sequence"))
def pg_seq_tis(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, threshold: float = 3.0,
) -> LossOutput:  # fmt: skip
    """Policy gradient with the importance weight of the response, truncated at C.

        ∇J = min(ρ, C) ∇log π(y) A,   ρ = exp(Σₜ log π(yₜ; θ) - log μ(yₜ; θ'))

    Equation (6) of https://arxiv.org/abs/2510.26788; symbols, masked tokens, empty and non-finite rows as in
    `pg_seq_is`. Bounded variance, biased where ρ > C.

    Arguments, result and errors as in `pg_seq_is`, with min(ρ, C) for ρ, and `threshold` C >= 1. The weight is a
    constant in the gradient, at most C. `actor/truncated_fraction` is the share of responses with ρ > C.
    """
    threshold = require_threshold(threshold)
    batch = checked_batch(trainer_log_probs, rollout_log_probs, advantages, response_mask, other="rollout_log_probs")
    rho_B = batch.sequence_log_ratio_B.exp()
    beyond_B = rho_B > threshold
    output = _policy_gradient(batch, rho_B.clamp(max=threshold), aggregation)
    output = output._replace(truncated=beyond_B.unsqueeze(-1) & batch.valid_BT)
    return output.adding({"actor/truncated_fraction": reported.fraction(beyond_B, batch.rows_B)})


@policy_loss("vp_pg_seq_mis", "the same weight, rejected above C", "arXiv 2510.26788 eq. (7)", Ratio("sequence"))
def pg_seq_mis(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, threshold: float = 3.0,
) -> LossOutput:  # fmt: skip
    """Policy gradient with the importance weight of the response; a response with a weight above C is rejected.

        ∇J = ρ 1{ρ ≤ C} ∇log π(y) A,   ρ = exp(Σₜ log π(yₜ; θ) - log μ(yₜ; θ'))

    Equation (7) of https://arxiv.org/abs/2510.26788; symbols, masked tokens, empty and non-finite rows as in
    `pg_seq_is`. One-sided: a small ρ is never rejected. A rejected response has no gradient and stays in the
    denominator.

    Arguments, result and errors as in `pg_seq_is`, with ρ 1{ρ ≤ C} for ρ, and `threshold` C >= 1. The weight is a
    constant in the gradient, at most C. `actor/rejected_fraction` is the share of responses with ρ > C.
    """
    threshold = require_threshold(threshold)
    batch = checked_batch(trainer_log_probs, rollout_log_probs, advantages, response_mask, other="rollout_log_probs")
    rho_B = batch.sequence_log_ratio_B.exp()
    beyond_B = rho_B > threshold
    output = _policy_gradient(batch, torch.where(beyond_B, 0, rho_B), aggregation)
    return output.adding({"actor/rejected_fraction": reported.fraction(beyond_B, batch.rows_B)})


def _policy_gradient(batch: Batch, weight_B: Tensor, aggregation: Aggregation) -> LossOutput:
    """Return the loss with gradient w ∇log π(y) A."""
    weight_B = weight_B.to(batch.dtype)
    slope_BT = bounded_(weight_B.unsqueeze(-1) * batch.advantages_BT)
    objective_B = torch.where(batch.valid_BT, slope_BT, 0).sum(dim=-1) / batch.lengths_B.clamp(min=1)
    kept_BT = (slope_BT != 0) & batch.valid_BT
    metrics = reported.weight_statistics(weight_B, batch.rows_B)
    metrics |= reported.shared_metrics(batch, kept_BT.any(dim=-1), slope_BT, kept_BT)
    return LossOutput(loss_with_slope(batch, objective_B, slope_BT, aggregation), metrics, kept_BT)
