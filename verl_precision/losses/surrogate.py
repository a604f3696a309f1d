"""The clipped surrogate that GRPO and GSPO share, and its variants without clipping."""

import torch
from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import (
    LossOutput,
    Statistic,
    extremes,
    fraction,
    log_ratio_statistics,
    mean,
    weight_statistics,
)
from verl_precision.losses.ratios import Batch, bounded, loss_with_slope


def surrogate_loss(
    trainer_log_probs: Tensor,
    ratio: Tensor,
    batch: Batch,
    aggregation: Aggregation,
    clip_range: tuple[float, float] | None,
) -> LossOutput:
    """Return the loss of w min(rA, clip(r, 1-ε_low, 1+ε_high) A), or of w rA without clipping.

    The slope of a token is w r A where the first branch is taken, and exactly 0 where the second is: for A > 0 if
    r > 1 + ε_high, for A < 0 if r < 1 - ε_low.

    Args:
        trainer_log_probs: [B, T] floating; receives the gradient.
        ratio: r, [B, T] of each token or [B, 1] of each response; a number in the gradient.
        batch: the checked inputs; w are its weights, 1 if it has none.
        aggregation: mode and constants.
        clip_range: ε_low and ε_high, or None.
    """
    advantages_BT = batch.advantages_BT
    objective_BT = slope_BT = bounded(ratio * advantages_BT)
    metrics: dict[str, Statistic] = {}
    if clip_range is not None:
        low, high = clip_range
        clipped_high_BT = (ratio > 1 + high) & (advantages_BT > 0)
        clipped_low_BT = (ratio < 1 - low) & (advantages_BT < 0)
        slope_BT = torch.where(clipped_high_BT | clipped_low_BT, 0, objective_BT)
        objective_BT = torch.minimum(objective_BT, bounded(ratio.clamp(1 - low, 1 + high) * advantages_BT))
        metrics["actor/clip_fraction_high"] = fraction(clipped_high_BT & batch.valid_BT, batch.lengths_B)
        metrics["actor/clip_fraction_low"] = fraction(clipped_low_BT & batch.valid_BT, batch.lengths_B)
    if batch.weights_BT is not None:
        weights_BT = torch.where(batch.valid_BT, batch.weights_BT, 0).to(slope_BT.dtype)
        slope_BT, objective_BT = bounded(slope_BT * weights_BT), bounded(objective_BT * weights_BT)
        metrics |= weight_statistics(weights_BT, batch.valid_BT)
    counted = batch.rows_B.unsqueeze(-1) if ratio.shape[-1] == 1 else batch.valid_BT
    metrics["actor/ratio_mean"] = mean(ratio, counted)
    metrics |= extremes(ratio, counted, "actor/ratio")
    return LossOutput(
        loss_with_slope(trainer_log_probs, objective_BT.expand_as(batch.valid_BT), slope_BT, batch, aggregation),
        {**metrics, **log_ratio_statistics(batch.sequence_log_ratio_B, batch.rows_B, batch.nonfinite)},
    )
