"""Off-policy sequence masking: GRPO without the responses that π has left and is to leave further."""

import dataclasses

from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.clipping import Ratio
from verl_precision.losses.grpo import surrogate_loss
from verl_precision.losses.metrics import LossOutput, fraction
from verl_precision.losses.ratios import checked_batch
from verl_precision.losses.registry import policy_loss
from verl_precision.losses.settings import require_divergence


@policy_loss(
    "vp_off_policy_sequence_mask",
    "clipped surrogate, without responses of A < 0 that π has moved away from",
    "arXiv 2512.02556 eq. (8), (9)",
    Ratio("token", "ratio"),
)
def off_policy_sequence_mask(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, rejection_threshold: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.28,
) -> LossOutput:  # fmt: skip
    """GRPO's clipped surrogate with the mask of DeepSeek-V3.2.

        ∇J = Σₜ Mₜ ∇min(rₜA, clip(rₜ, 1-ε_low, 1+ε_high) A),   rₜ = π(yₜ; θ) / μ(yₜ; θ')
        Mₜ = 0 if A < 0 and (1/|y|) Σₛ log μ(yₛ; θ')/π(yₛ; θ) > δ; else 1

    π trainer's policy, of the present weights; μ rollout's policy, as the rollout reports it: both staleness and the
    mismatch are in M. Equations (8) and (9) of https://arxiv.org/abs/2512.02556, whose π_old is μ, without its KL term.
    A response of A > 0 is never dropped. A dropped one has no gradient and stays in the denominator.

    Arguments, result and errors as in `grpo`, with `rollout_log_probs`, [B, T] floating, log μ(yₜ; θ') in nats, and
    `rejection_threshold`, δ > 0 in nats per token, of which the paper prints none. M is a constant in the gradient.
    `actor/rejected_fraction` is the share of dropped responses, `actor/is_weight_*` are of M.
    """
    limit = require_divergence(rejection_threshold, "rejection_threshold")
    batch = checked_batch(trainer_log_probs, rollout_log_probs, advantages, response_mask, other="rollout_log_probs")
    dropped_BT = (-batch.mean_log_ratio_B > limit).unsqueeze(-1) & (batch.advantages_BT < 0) & batch.valid_BT
    batch = dataclasses.replace(batch, weights_BT=(~dropped_BT).to(batch.dtype))
    output = surrogate_loss(batch, batch.ratio_BT, aggregation, (clip_low, clip_high))
    return output.adding({"actor/rejected_fraction": fraction(dropped_BT.any(dim=-1), batch.rows_B)})
