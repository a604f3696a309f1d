"""Statistics of the gap between the trainer's and the rollout's log-probabilities of the same tokens.

Shapes: B responses, T response tokens (padded).
"""

import torch
from torch import Tensor

from verl_precision.errors import ConfigurationError


def log_prob_gap_statistics(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Measure the token-level gap gₜ = log π(yₜ) - log μ(yₜ).

        mismatch/log_prob_gap_abs_mean = mean |gₜ|            (nats; 0 is best)
        mismatch/log_prob_gap_mean     = mean gₜ              (nats; the k1 estimate of -KL(μ‖π))
        mismatch/k3_kl                 = mean e^{gₜ} - gₜ - 1  (nats; unbiased estimate of KL(μ‖π), ≥ 0)
        mismatch/probs_pearson         = correlation of π(yₜ) and μ(yₜ) over tokens (1 is best)

    π is the trainer's policy, μ the rollout's, yₜ the tokens the rollout sampled. k3: Schulman,
    http://joschu.net/blog/kl-approx.html.

    Args:
        trainer_log_probs: [B, T] floating, log π(yₜ) in nats.
        rollout_log_probs: [B, T] floating, log μ(yₜ) in nats.
        response_mask: [B, T], nonzero where a token counts.

    Returns:
        The four values, computed in float64. Masked tokens never matter, whatever they hold. Without a single valid
        token the dictionary is empty; the correlation is left out where it is undefined (fewer than two tokens, or
        constant probabilities). Non-finite log-probs on valid tokens show as non-finite values.

    Raises:
        ConfigurationError: if the shapes differ or the log-probs are not floating point.
    """
    if not trainer_log_probs.shape == rollout_log_probs.shape == response_mask.shape:
        raise ConfigurationError(
            f"log-probs and mask must have one shape; got trainer {tuple(trainer_log_probs.shape)}, rollout "
            f"{tuple(rollout_log_probs.shape)}, mask {tuple(response_mask.shape)}."
        )
    if not (trainer_log_probs.is_floating_point() and rollout_log_probs.is_floating_point()):
        raise ConfigurationError(
            f"log-probs must be floating point; got {trainer_log_probs.dtype} and {rollout_log_probs.dtype}."
        )
    valid = response_mask.bool()
    pi, mu = trainer_log_probs[valid].double(), rollout_log_probs[valid].double()
    if pi.numel() == 0:
        return {}
    gap = pi - mu
    statistics = {
        "mismatch/log_prob_gap_abs_mean": gap.abs().mean().item(),
        "mismatch/log_prob_gap_mean": gap.mean().item(),
        "mismatch/k3_kl": (torch.expm1(gap) - gap).mean().item(),
    }
    probabilities = torch.stack([pi.exp(), mu.exp()])
    if pi.numel() > 1 and bool((probabilities.std(dim=1) > 0).all()):
        statistics["mismatch/probs_pearson"] = torch.corrcoef(probabilities)[0, 1].item()
    return statistics
