"""GSPO: a clipped ratio of whole responses, length-normalised. Registered with verl as `vp_gspo` (`gspo` is verl's)."""

from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.clipping import Ratio
from verl_precision.losses.grpo import surrogate_loss
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import bounded_exp, checked_batch
from verl_precision.losses.registry import policy_loss


@policy_loss("vp_gspo", "clipped ratio of responses", "arXiv 2507.18071 eq. (5)-(7)", Ratio("sequence", "ratio"))
def gspo(
    trainer_log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, clip_low: float = 3e-4, clip_high: float = 4e-4, rollout_is_weights: Tensor | None = None,
) -> LossOutput:  # fmt: skip
    """Group sequence policy optimisation.

        J = min(sA, clip(s, 1-ε_low, 1+ε_high) A),   s = (π(y; θ) / π(y; θ'))^(1/|y|) = exp(meanₜ log rₜ)

    π trainer's policy, θ' the weights the rollout was drawn with, |y| tokens of the response. Equations (5) to (7) of
    https://arxiv.org/abs/2507.18071, whose clip range is the default here. ∇s = s (1/|y|) Σₜ ∇log π(yₜ), so with the
    paper's aggregation, mode "seq-mean-token-mean", every token carries sA and their mean is J.

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`; s is held at 2e11 in float32,
    beyond a mean log-ratio of 25.9. (verl's `gspo` multiplies weights and advantages of masked tokens by 0, and
    NaN x 0 is NaN.)
    """
    batch = checked_batch(trainer_log_probs, proximal_log_probs, advantages, response_mask, rollout_is_weights)
    ratio_B1 = bounded_exp(batch.mean_log_ratio_B, batch.dtype).unsqueeze(-1)
    return surrogate_loss(batch, ratio_B1, aggregation, (clip_low, clip_high))
