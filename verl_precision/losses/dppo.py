"""DPPO: a trust region of probabilities, not of ratios. Registered with verl as `vp_dppo_tv` and `vp_dppo_kl`.

PPO clips the ratio. If two engines round differently, a rare token's ratio is large, although hardly any probability
has moved. A likely token can lose half of its probability within the clip range. DPPO masks a token by how much
probability has moved away from the rollout's policy, which drew the token.

docs/math.md explains how verl's own `dppo_tv` and `dppo_kl` differ, and why C is 20. Source:
https://arxiv.org/abs/2602.04879.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.grpo import weighted_loss
from verl_precision.losses.metrics import LossOutput, weight_statistics
from verl_precision.losses.ratios import checked_batch
from verl_precision.losses.registry import policy_loss
from verl_precision.losses.settings import Ratio, require_clip_range, require_threshold


@policy_loss("vp_dppo_tv", "trust region of total variation", "arXiv 2602.04879, binary TV", Ratio("token"))
def dppo_tv(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, threshold: float = 20.0, clip_low: float = 0.15, clip_high: float = 0.15,
) -> LossOutput:  # fmt: skip
    """Divergence proximal policy optimisation, with the total variation of "this token or another one".

        ∇J = Σₜ Mₜ min(rₜ, C) A ∇log π(yₜ; θ),   rₜ = π(yₜ; θ) / μ(yₜ; θ')
        Mₜ = 0 if A > 0 and π - μ > δ_high, or A < 0 and μ - π > δ_low; else 1

    π trainer's policy, μ rollout's policy, A advantage, π and μ of the token. The binary TV variant of
    https://arxiv.org/abs/2602.04879. A token is masked only where the update would move it further away.

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`, with `rollout_log_probs`, [B, T]
    floating, log μ(yₜ; θ') in nats, with `threshold`, C >= 1, and with `clip_low` in (0, 1] and `clip_high` > 0 for
    δ_low and δ_high, differences of probabilities. Weight and mask are constants in the gradient.
    `actor/clip_fraction_*` are the masked tokens, `actor/truncated_fraction` is the share of tokens with rₜ > C,
    `actor/ratio_*` are for rₜ before C, `actor/is_weight_*` for Mₜ min(rₜ, C).
    """
    tensors = trainer_log_probs, rollout_log_probs, advantages, response_mask
    return _trust_region(
        tensors, aggregation, threshold, lambda pi, mu: (pi.exp() - mu.exp()).abs(), (clip_low, clip_high)
    )


@policy_loss("vp_dppo_kl", "trust region of KL divergence", "arXiv 2602.04879, binary KL", Ratio("token"))
def dppo_kl(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
    aggregation: Aggregation, threshold: float = 20.0, clip_low: float = 0.05, clip_high: float = 0.05,
) -> LossOutput:  # fmt: skip
    """Divergence proximal policy optimisation, with the KL divergence of "this token or another one".

        ∇J = Σₜ Mₜ min(rₜ, C) A ∇log π(yₜ; θ),   rₜ = π(yₜ; θ) / μ(yₜ; θ')
        Mₜ = 0 if A > 0 and r > 1 and D > δ_high, or A < 0 and r < 1 and D > δ_low; else 1
        D = μ log(μ/π) + (1 - μ) log((1 - μ)/(1 - π)), with 0 log 0 = 0

    The binary KL variant of https://arxiv.org/abs/2602.04879; symbols as in `dppo_tv`. It is stricter than total
    variation where a token is nearly certain.

    Arguments, result and errors as in `dppo_tv`; δ_low in (0, 1] and δ_high > 0 are in nats. 1 - π is computed from
    log π without cancellation; where π rounds to 1 and μ does not, D is inf.
    """
    tensors = trainer_log_probs, rollout_log_probs, advantages, response_mask
    return _trust_region(tensors, aggregation, threshold, binary_kl, (clip_low, clip_high))


def binary_kl(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Return μ log(μ/π) + (1 - μ) log((1 - μ)/(1 - π)), with 0 log 0 = 0 and 1 - π without cancellation.

    A log-prob above 0, which is rounding, counts as 0.
    """
    trainer, rollout = trainer.clamp(max=0), rollout.clamp(max=0)
    other_trainer, other_rollout = -torch.expm1(trainer), -torch.expm1(rollout)
    others = torch.xlogy(other_rollout, other_rollout) - torch.xlogy(other_rollout, other_trainer)
    return rollout.exp() * (rollout - trainer) + others


def _trust_region(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], aggregation: Aggregation, threshold: float,
    divergence: Callable[[Tensor, Tensor], Tensor], region: tuple[float, float],
) -> LossOutput:  # fmt: skip
    """Return the loss with slope M min(r, C) A, where M is 0 for a divergence beyond `region` (δ_low, δ_high)."""
    batch = checked_batch(*tensors, other="rollout_log_probs")
    threshold, (low, high) = require_threshold(threshold), require_clip_range(*region)
    divergence_BT = divergence(*(log_probs.detach().to(batch.dtype) for log_probs in tensors[:2]))
    ratio_BT = batch.ratio_BT
    outside_low_BT = (divergence_BT > low) & (batch.log_ratio_BT < 0) & (batch.advantages_BT < 0)
    outside_high_BT = (divergence_BT > high) & (batch.log_ratio_BT > 0) & (batch.advantages_BT > 0)
    weight_BT = torch.where(outside_low_BT | outside_high_BT, 0, ratio_BT.clamp(max=threshold))
    masked, truncated = (outside_low_BT, outside_high_BT), ratio_BT > threshold
    output = weighted_loss(batch, ratio_BT, weight_BT, aggregation, masked, truncated=truncated)
    return output.adding(weight_statistics(weight_BT, batch.valid_BT))
