"""GRPO as in the paper's equation (8), its weighted forms (9) and (10), related losses, and two interventions.

The weighted forms are this `grpo` with `rollout_is_weights` of `rollout_weights`: min(ρₜ, C) for (9), ρ 1{ρ ≤ C} for
(10). `grpo_unclipped` and `ratio_one` are experiments, not estimators to train with: each removes one part of
`grpo` that turns a precision gap into a wrong gradient (docs/math.md, phantom clipping).
"""

from dataclasses import replace

import torch
from torch import Tensor

from verl_precision.losses import metrics as reported
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import Batch, bounded_, bounded_exp, checked_batch, loss_with_slope
from verl_precision.losses.registry import policy_loss
from verl_precision.losses.settings import NO_RATIO, Ratio, require_clip_range, require_divergence


@policy_loss("vp_grpo", "clipped surrogate without dual clip", "arXiv 2510.26788 eq. (8)", Ratio("token", "ratio"))
def grpo(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, clip_low: float = 0.2, clip_high: float = 0.28, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO's clipped surrogate, without dual clip.

        ∇J = Σₜ wₜ ∇min(rₜA, clip(rₜ, 1-ε_low, 1+ε_high) A),   rₜ = π(yₜ; θ) / π(yₜ; θ')

    π trainer's policy, θ' the weights the rollout was drawn with, A advantage, wₜ = 1 unless given. Equation (8) of
    https://arxiv.org/abs/2510.26788; with the weights of `rollout_weights`, equations (9) and (10).

    Args:
        trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats; receives the gradient.
        proximal_log_probs: [B, T] floating, log π(yₜ; θ') in nats, from the trainer.
        advantages: [B, T], [B, 1] or [B] floating.
        response_mask: [B, T], nonzero where a token counts.
        aggregation: Mode and constants; `Aggregation(normalizer=...)` for Dr.GRPO's.
        clip_low: ε_low in (0, 1].
        clip_high: ε_high > 0.
        rollout_is_weights: [B, T] floating, wₜ, constants in the gradient; a response of weight 0 stays in the
            denominator.

    Returns:
        The loss in float32 (float64 if the log-probs are), minus the aggregated objective. Its gradient is minus the
        equation's, aggregated; only `trainer_log_probs` has a gradient. Values of masked tokens have no effect;
        an empty row has no gradient and counts as a response. A row with NaN or inf on a valid token has no gradient,
        stays in the denominator, and is counted in `actor/nonfinite_responses`. rₜ is held at 2e11 in float32, beyond a
        log-ratio of 25.9 (`ratios.HEADROOM`), and `actor/held_tokens` counts such tokens.

    Raises:
        ConfigurationError: If shapes differ, a tensor is not floating point, or the clip range is out of bounds.

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
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    return surrogate_loss(batch, batch.ratio_BT, aggregation, (clip_low, clip_high))


@policy_loss("vp_gspo", "clipped ratio of responses", "arXiv 2507.18071 eq. (5)-(7)", Ratio("sequence", "ratio"))
def gspo(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, clip_low: float = 3e-4, clip_high: float = 4e-4, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """Group sequence policy optimisation. Registered with verl as `vp_gspo` (`gspo` is verl's).

        J = min(sA, clip(s, 1-ε_low, 1+ε_high) A),   s = (π(y; θ) / π(y; θ'))^(1/|y|) = exp(meanₜ log rₜ)

    π trainer's policy, θ' the weights the rollout was drawn with, |y| tokens of the response. Equations (5) to (7) of
    https://arxiv.org/abs/2507.18071, whose clip range is the default here. ∇s = s (1/|y|) Σₜ ∇log π(yₜ), so with the
    paper's aggregation, mode "seq-mean-token-mean", every token carries sA and their mean is J. With advantages that
    differ within a response, each token carries s times its own A, and the loss is the paper's GSPO-token.

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`; s is held at 2e11 in float32,
    beyond a mean log-ratio of 25.9. (verl's `gspo` multiplies weights and advantages of masked tokens by 0, but
    NaN x 0 is NaN.)
    """
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    ratio_B1 = bounded_exp(batch.mean_log_ratio_B, batch.dtype).unsqueeze(-1)
    return surrogate_loss(batch, ratio_B1, aggregation, (clip_low, clip_high))


_DEEPSEEKS = "arXiv 2512.02556 eq. (8), (9)", Ratio("token", "ratio")


@policy_loss("vp_off_policy_sequence_mask", "`grpo` without responses of A < 0 that π has left", *_DEEPSEEKS)
def off_policy_sequence_mask(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, rejection_threshold: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.28,
) -> LossOutput:  # fmt: skip
    """GRPO's clipped surrogate with the mask of DeepSeek-V3.2.

        ∇J = Σₜ Mₜ ∇min(rₜA, clip(rₜ, 1-ε_low, 1+ε_high) A),   rₜ = π(yₜ; θ) / μ(yₜ; θ')
        Mₜ = 0 if A < 0 and (1/|y|) Σₛ log μ(yₛ; θ')/π(yₛ; θ) > δ; else 1

    π trainer's policy, of the present weights; μ rollout's policy, as the rollout reports it, so that M contains both
    staleness and the mismatch. Equations (8) and (9) of https://arxiv.org/abs/2512.02556 with μ for π_old, without KL.
    A response of A > 0 is never dropped. A dropped response has no gradient and stays in the denominator.

    Arguments, result and errors as in `grpo`, with `rollout_log_probs`, [B, T] floating, log μ(yₜ; θ') in nats, and
    `rejection_threshold`, δ > 0 in nats per token; the paper gives no value. M is a constant in the gradient.
    `actor/rejected_fraction` is the share of dropped responses, `actor/is_weight_*` are of M.
    """
    batch = checked_batch(trainer_log_probs, rollout_log_probs, advantages, response_mask, other="rollout_log_probs")
    return _masked_surrogate(batch, -batch.mean_log_ratio_B, rejection_threshold, aggregation, (clip_low, clip_high))


@policy_loss("vp_off_policy_sequence_mask_decoupled", "the same mask, the clip by the old policy", *_DEEPSEEKS)
def off_policy_sequence_mask_decoupled(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, rejection_threshold: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.28,
    rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO's clipped surrogate with DeepSeek-V3.2's mask by μ; the ratio, and so the clip, is the trainer's own.

        ∇J = Σₜ Mₜ ∇min(rₜA, clip(rₜ, 1-ε_low, 1+ε_high) A),   rₜ = π(yₜ; θ) / π(yₜ; θ')

    M as in `off_policy_sequence_mask`, whose ratio contains the precision gap, so that rounding can clip a token. TRL
    and slime wire equations (8) and (9) of https://arxiv.org/abs/2512.02556 as here.

    Arguments, result, errors and metrics as there, with `proximal_log_probs` as in `grpo`, and `rollout_is_weights`,
    [B, T] floating, π(yₜ; θ')/μ(yₜ; θ') > 0 where a token counts, which tell μ and weight nothing; None: μ is π(θ').
    """
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    divergence_B = -batch.mean_log_ratio_B
    if batch.weights_BT is not None:
        log_BT = torch.where(batch.valid_BT, batch.weights_BT, 1).log()
        divergence_B = divergence_B - log_BT.sum(dim=-1, dtype=torch.float64) / batch.lengths_B.clamp(min=1)
    return _masked_surrogate(batch, divergence_B, rejection_threshold, aggregation, (clip_low, clip_high))


def _masked_surrogate(
    batch: Batch, divergence_B: Tensor, threshold: float, aggregation: Aggregation, clip_range: tuple[float, float]
) -> LossOutput:
    """Return the clipped surrogate without responses of A < 0 whose divergence of μ from π is above the threshold."""
    limit = require_divergence(threshold, "rejection_threshold")
    dropped_BT = (divergence_B > limit).unsqueeze(-1) & (batch.advantages_BT < 0) & batch.valid_BT
    batch = replace(batch, weights_BT=(~dropped_BT).to(batch.dtype))
    output = surrogate_loss(batch, batch.ratio_BT, aggregation, clip_range)
    return output.adding({"actor/rejected_fraction": reported.fraction(dropped_BT.any(dim=-1), batch.rows_B)})


@policy_loss("vp_grpo_unclipped", "intervention: grpo without clipping", "arXiv 2510.26788 eq. (8)", Ratio("token"))
def grpo_unclipped(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """GRPO's ratio without clipping: the precision gap stays in the ratio, but cannot cut a token's gradient.

        ∇J = Σₜ wₜ ∇rₜA,   rₜ = π(yₜ; θ) / π(yₜ; θ')

    Intervention (c) of the phantom-clipping analysis; equation (8) of https://arxiv.org/abs/2510.26788 with an infinite
    clip range. Arguments, result and errors as in `grpo`.
    """
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    return surrogate_loss(batch, batch.ratio_BT, aggregation, None)


@policy_loss("vp_ratio_one", "intervention: grpo with a ratio of 1", "arXiv 2510.26788 eq. (8) at r = 1", NO_RATIO)
def ratio_one(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """Policy gradient with a ratio of one, so neither the precision gap nor the change of the policy affects it.

        ∇J = Σₜ wₜ ∇log π(yₜ; θ) A

    Intervention (b) of the phantom-clipping analysis; equation (8) of https://arxiv.org/abs/2510.26788 at rₜ = 1. The
    proximal log-probs enter the metrics only. Arguments, result and errors as in `grpo`; `actor/ratio_*` are 1.
    """
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    return surrogate_loss(batch, torch.ones_like(batch.log_ratio_BT), aggregation, None)


def surrogate_loss(
    batch: Batch, ratio: Tensor, aggregation: Aggregation, clip_range: tuple[float, float] | None
) -> LossOutput:
    """Return the loss of w min(rA, clip(r, 1-ε_low, 1+ε_high) A), or of w rA without clipping.

    The slope of a token is w r A in the first branch, and exactly 0 in the second: for A > 0 if r > 1 + ε_high, for
    A < 0 if r < 1 - ε_low. r is [B, T] of tokens or [B, 1] of responses, a constant in the gradient; w are the batch's
    weights, 1 without weights; `clip_range` is ε_low and ε_high.
    """
    if clip_range is None:
        return weighted_loss(batch, ratio, ratio, aggregation)
    low, high = require_clip_range(*clip_range)
    bounds, advantages_BT = (1 - low, 1 + high), batch.advantages_BT
    clipped = (ratio < bounds[0]) & (advantages_BT < 0), (ratio > bounds[1]) & (advantages_BT > 0)
    return weighted_loss(batch, ratio, ratio, aggregation, clipped, bounds)


def weighted_loss(
    batch: Batch, ratio: Tensor, factor: Tensor, aggregation: Aggregation,
    silenced: tuple[Tensor, Tensor] | None = None, bounds: tuple[float, float] | None = None,
    truncated: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """Return the loss with slope w A times a factor, and the metrics of every loss with a ratio.

    The two masks of `silenced` tokens, for A < 0 and A > 0, set the slope to 0. With `bounds` this is a clip, and the
    objective is w A times the bound. `truncated` tokens have a ratio that is held at a bound.
    """
    valid_BT, advantages_BT = batch.valid_BT, batch.advantages_BT
    counted = batch.rows_B.unsqueeze(-1) if ratio.shape[-1] == 1 else valid_BT
    metrics = {"actor/ratio_mean": reported.mean(ratio, counted), **reported.extremes(ratio, counted, "actor/ratio")}
    objective_BT = slope_BT = bounded_(factor * advantages_BT)
    clipped_BT = None
    if silenced is not None:
        low_BT, high_BT = (tokens & valid_BT for tokens in silenced)
        metrics["actor/clip_fraction_low"] = reported.fraction(low_BT, batch.lengths_B)
        metrics["actor/clip_fraction_high"] = reported.fraction(high_BT, batch.lengths_B)
        lost_BT = low_BT | high_BT
        if bounds is not None:
            low, high = (advantages_BT.new_tensor(bound) for bound in bounds)
            held_BT = torch.where(high_BT, high, low).mul_(advantages_BT)
            clipped_BT, objective_BT = lost_BT, torch.where(lost_BT, bounded_(held_BT), slope_BT)
            del held_BT
        slope_BT = torch.where(lost_BT, 0, slope_BT)
    if truncated is not None:
        truncated = truncated & valid_BT
        metrics["actor/truncated_fraction"] = reported.fraction(truncated, batch.lengths_B)
    if batch.weights_BT is not None:
        weights_BT = torch.where(valid_BT, batch.weights_BT, 0).to(batch.dtype)
        slope_BT, objective_BT = bounded_(slope_BT * weights_BT), bounded_(objective_BT * weights_BT)
        clipped_BT = None if clipped_BT is None else clipped_BT & (weights_BT != 0)
        metrics |= reported.weight_statistics(weights_BT, valid_BT)
    objective_BT = torch.where(valid_BT, objective_BT, 0)
    objective_B, has_loss_B = objective_BT.sum(dim=-1), (objective_BT != 0).any(dim=-1)
    del objective_BT  # a third of the memory that one loss holds at a time
    kept_BT = (slope_BT != 0) & valid_BT
    metrics |= reported.shared_metrics(batch, has_loss_B, slope_BT, kept_BT)
    loss = loss_with_slope(batch, objective_B, slope_BT, aggregation)
    return LossOutput(loss, metrics, kept_BT, clipped_BT, truncated)
