"""CISPO: the ratio is a bounded weight of the gradient. Registered with verl as `vp_cispo` (`cispo` is verl's)."""

from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.grpo import weighted_loss
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import checked_batch
from verl_precision.losses.registry import policy_loss
from verl_precision.losses.settings import Ratio, require_clip_range


@policy_loss("vp_cispo", "the bounded ratio as a weight", "arXiv 2506.13585 eq. (4)", Ratio("token"))
def cispo(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, clip_low: float = 1.0, clip_high: float = 5.0, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """Clipped importance-sampling policy optimisation.

        ∇J = Σₜ wₜ clip(rₜ, 1-ε_low, 1+ε_high) A ∇log π(yₜ; θ),   rₜ = π(yₜ; θ) / π(yₜ; θ')

    π trainer's policy, θ' the weights the rollout was drawn with, A advantage, wₜ = 1 unless given. Equations (4) and
    (5) of https://arxiv.org/abs/2506.13585, whose authors set no lower bound (ε_low = 1 here). GRPO's clip sets the
    gradient of a token to zero, whether the policy has moved or two engines have rounded differently. CISPO holds the
    token's weight at the bound instead, so phantom clipping cannot occur.

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`, with wₜ clip(rₜ) A as the
    objective and "token-mean" as the paper's aggregation. The bounded ratio is a constant in the gradient.
    `actor/ratio_*` are of the bounded ratio, `actor/truncated_fraction` is the share of tokens at a bound. (In verl's
    `cispo` a weight of NaN on a masked token makes the gradient NaN.)
    """
    low, high = require_clip_range(clip_low, clip_high)
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    ratio_BT = batch.ratio_BT
    bounded_BT = ratio_BT.clamp(1 - low, 1 + high)
    return weighted_loss(batch, bounded_BT, bounded_BT, aggregation, truncated=ratio_BT != bounded_BT)
