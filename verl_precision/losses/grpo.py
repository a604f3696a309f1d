"""GRPO as in the paper's equation (8), its weighted forms (9) and (10), and two interventions on its ratio.

The weighted forms are this `grpo` with `rollout_is_weights` of `rollout_weights`: min(ρₜ, C) for (9), ρ 1{ρ ≤ C} for
(10).

`grpo_unclipped` and `ratio_one` are not estimators to train with but experiments: each takes one thing away from
`grpo` that turns a precision gap into a wrong gradient (docs/math.md, phantom clipping).
"""

import torch
from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import bounded_exp, checked_batch
from verl_precision.losses.settings import require_clip_range
from verl_precision.losses.surrogate import surrogate_loss


def grpo(
    trainer_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    rollout_is_weights: Tensor | None = None,
) -> LossOutput:
    """GRPO's clipped surrogate, without dual clip.

        ∇J = Σₜ wₜ ∇min(rₜA, clip(rₜ, 1-ε_low, 1+ε_high) A),   rₜ = π(yₜ; θ) / π(yₜ; θ')

    π trainer's policy, θ' the weights the rollout was drawn with, A advantage, wₜ = 1 unless given. Equation (8) of
    https://arxiv.org/abs/2510.26788; with the weights of `rollout_weights`, equations (9) and (10).

    Args:
        trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats; receives the gradient.
        proximal_log_probs: [B, T] floating, log π(yₜ; θ') in nats, from the trainer.
        advantages: [B, T] or [B] floating.
        response_mask: [B, T], nonzero where a token counts.
        aggregation: mode and constants; Dr.GRPO's by default.
        clip_low: ε_low in (0, 1].
        clip_high: ε_high > 0.
        rollout_is_weights: [B, T] floating, wₜ, constants in the gradient; a response of weight 0 stays in the
            denominator.

    Returns:
        The loss in float32 (float64 if the log-probs are), minus the aggregated objective. Its gradient is minus the
        equation's, aggregated; only `trainer_log_probs` receives one. Masked tokens never matter, whatever they hold;
        an empty row has no gradient and counts as a response. A row with NaN or inf on a valid token has no gradient,
        stays in the denominator, and is counted in `actor/nonfinite_responses`. rₜ is held at 3e28 in float32, beyond a
        log-ratio of 65.7 (`ratios.HEADROOM`).

    Raises:
        ConfigurationError: if shapes differ, a tensor is not floating point, or the clip range is out of bounds.

    Example:
        >>> import torch
        >>> from verl_precision.losses.aggregation import Aggregation
        >>> from verl_precision.losses import grpo
        >>> proximal = torch.full((1, 3), -1.0)
        >>> trainer = (proximal + torch.tensor([0.1, 0.5, -0.5])).requires_grad_()  # r = 1.11, 1.65, 0.61
        >>> aggregation = Aggregation(normalizer=3)
        >>> output = grpo(trainer, proximal, torch.ones(1, 3), torch.ones(1, 3), aggregation=aggregation)
        >>> output.loss.backward()
        >>> trainer.grad  # -rA / 3; the second token is clipped
        tensor([[-0.3684, -0.0000, -0.2022]])
    """
    batch = checked_batch(
        trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights, "proximal_log_probs"
    )
    ratio_BT = bounded_exp(batch.log_ratio_BT, batch.log_ratio_BT.dtype)
    return surrogate_loss(trainer_log_probs, ratio_BT, batch, aggregation, require_clip_range(clip_low, clip_high))


def grpo_unclipped(
    trainer_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    rollout_is_weights: Tensor | None = None,
) -> LossOutput:
    """GRPO's ratio without clipping: the precision gap stays in the ratio and can no longer choose a branch.

        ∇J = Σₜ wₜ ∇rₜA,   rₜ = π(yₜ; θ) / π(yₜ; θ')

    Intervention (c) of the phantom-clipping analysis; equation (8) of https://arxiv.org/abs/2510.26788 with an infinite
    clip range. Everything else as in `grpo`.

    Args:
        trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats; receives the gradient.
        proximal_log_probs: [B, T] floating, log π(yₜ; θ') in nats.
        advantages: [B, T] or [B] floating.
        response_mask: [B, T], nonzero where a token counts.
        aggregation: mode and constants.
        rollout_is_weights: [B, T] floating, wₜ, constants in the gradient.

    Returns:
        As `grpo`.

    Raises:
        ConfigurationError: if shapes differ or a tensor is not floating point.
    """
    batch = checked_batch(
        trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights, "proximal_log_probs"
    )
    ratio_BT = bounded_exp(batch.log_ratio_BT, batch.log_ratio_BT.dtype)
    return surrogate_loss(trainer_log_probs, ratio_BT, batch, aggregation, None)


def ratio_one(
    trainer_log_probs: Tensor,
    proximal_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    rollout_is_weights: Tensor | None = None,
) -> LossOutput:
    """Policy gradient with the ratio set to one: neither the precision gap nor the change of the policy is in it.

        ∇J = Σₜ wₜ ∇log π(yₜ; θ) A

    Intervention (b) of the phantom-clipping analysis; equation (8) of https://arxiv.org/abs/2510.26788 at rₜ = 1. The
    proximal log-probs enter the metrics only.

    Args:
        trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats; receives the gradient.
        proximal_log_probs: [B, T] floating, log π(yₜ; θ') in nats.
        advantages: [B, T] or [B] floating.
        response_mask: [B, T], nonzero where a token counts.
        aggregation: mode and constants.
        rollout_is_weights: [B, T] floating, wₜ, constants in the gradient.

    Returns:
        As `grpo`; `actor/ratio_*` are 1.

    Raises:
        ConfigurationError: if shapes differ or a tensor is not floating point.
    """
    batch = checked_batch(
        trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights, "proximal_log_probs"
    )
    return surrogate_loss(trainer_log_probs, torch.ones_like(batch.log_ratio_BT), batch, aggregation, None)
