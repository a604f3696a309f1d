"""What the ratio of a clipped loss is made of, and which tokens its clip silences for their rounding alone.

With a shadow, a forward of the trainer's present weights in the rollout's precision:

    beta  = log π(yₜ) - log shadow(yₜ)     same weights, two precisions
    alpha = log shadow(yₜ) - log μ(yₜ)     same precision, the policy's real change

so alpha + beta = log π - log μ, the log-ratio of a loss in bypass mode. A token is clipped when PPO's clipped branch is
taken and its gradient is exactly zero: A > 0 and r > 1 + ε_high, or A < 0 and r < 1 - ε_low. It is phantom-clipped when
that is so with beta and would not be without. Sources: docs/metrics.md.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.losses.settings import require_clip_range
from verl_precision.mergeable import Deviation, Maximum, Mean, Minimum, Share, Statistic, StatisticSet, merge_by_name
from verl_precision.mismatch.packing import Chunk, packed_chunks
from verl_precision.mismatch.token_bins import CLASSES, ClassMean, class_totals, token_classes


@dataclass(frozen=True)
class PhantomStatistics(StatisticSet):
    """All `phantom/...` metrics, mergeable."""

    prefix: ClassVar[str] = "phantom/"

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        trainer_log_probs: Tensor,
        shadow_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor,
        ratio_log_probs: Tensor | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        chunk_tokens: int | None = None,
    ) -> Self:
        """Measure a batch, or a part of one.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats, or nested (torch.jagged): what the loss sees.
            shadow_log_probs: Likewise, of the same weights in the rollout's precision.
            rollout_log_probs: Likewise, log μ(yₜ).
            response_mask: [B, T], nonzero where a token counts; with nested log-probs nested, or None for all.
            advantages: [B, T], nested, or [B]. A token without a sign (0, NaN) is never clipped.
            ratio_log_probs: What the loss's ratio is taken against, log r = log π - this. None: the rollout's, as in
                bypass mode. Without beta the ratio is log shadow - this. Old log-probs that the trainer itself computed
                have a beta of their own, which cancels much of this one in r and not in the ratio without beta.
            clip_low: ε_low in (0, 1], as the loss has it.
            clip_high: ε_high > 0.
            chunk_tokens: Tokens at a time; None fits the device.

        Returns:
            The statistics, on the CPU. Masked tokens never matter. Valid tokens with a NaN, an infinite or a positive
            log-prob (any of those given) are counted and left out.

        Raises:
            ConfigurationError: If shapes, layouts, types or the clip range do not fit.
        """
        require_clip_range(clip_low, clip_high)
        log_probs = {
            "trainer_log_probs": trainer_log_probs,
            "shadow_log_probs": shadow_log_probs,
            "rollout_log_probs": rollout_log_probs,
        }
        if ratio_log_probs is not None:
            log_probs["ratio_log_probs"] = ratio_log_probs
        statistics: dict[str, Statistic] = {}
        for chunk in packed_chunks(log_probs, response_mask, advantages, chunk_tokens):
            statistics = merge_by_name([statistics, chunk.counts])
            if len(chunk):
                statistics = merge_by_name([statistics, _token_statistics(chunk, clip_low, clip_high)])
        return cls.on_cpu(statistics)


def _token_statistics(chunk: Chunk, clip_low: float, clip_high: float) -> dict[str, Statistic]:
    """Return metric -> statistic, of the tokens of one chunk; a new metric is a new entry."""
    trainer_N, shadow_N, mu_N = chunk.log_probs[:3]
    against_N = chunk.log_probs[-1] if len(chunk.log_probs) == 4 else mu_N
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf  # ε_low = 1: no ratio is below 0
    high = math.log1p(clip_high)

    assert chunk.advantages_N is not None
    positive_N, negative_N = chunk.advantages_N > 0, chunk.advantages_N < 0

    def clipped(log_ratio_N: Tensor) -> Tensor:
        return ((log_ratio_N > high) & positive_N) | ((log_ratio_N < low) & negative_N)

    clipped_N, clipped_without_beta_N = clipped(trainer_N - against_N), clipped(shadow_N - against_N)
    phantom_N, missed_N = clipped_N & ~clipped_without_beta_N, clipped_without_beta_N & ~clipped_N
    alpha_N, beta_N = shadow_N - mu_N, trainer_N - shadow_N
    alpha, (alpha_min, alpha_max) = alpha_N.sum(), alpha_N.aminmax()
    beta_min, beta_max = beta_N.aminmax()
    classes_N = token_classes(mu_N, chunk.advantages_N)
    tokens_C, beta_C, beta_abs_C = class_totals(classes_N, beta_N)
    phantom_C = torch.bincount(classes_N, weights=phantom_N.double(), minlength=CLASSES)
    n, bounds = alpha_N.new_full((), len(chunk)), (clip_low, clip_high)
    return {
        "alpha_mean": Mean(alpha, n),
        "alpha_abs_mean": Mean(alpha_N.abs().sum(), n),
        "alpha_std": Deviation(alpha, n, alpha_N.dot(alpha_N)),
        "alpha_min": Minimum(alpha_min),
        "alpha_max": Maximum(alpha_max),
        "beta_mean": ClassMean(beta_C, tokens_C, by=("sign",)),
        "beta_abs_mean": ClassMean(beta_abs_C, tokens_C, by=("bin",)),
        "beta_std": Deviation(beta_C, n, beta_N.dot(beta_N)),
        "beta_min": Minimum(beta_min),
        "beta_max": Maximum(beta_max),
        "beta_beyond_clip_fraction": Share(((beta_N > high) | (beta_N < low)).sum(), n, bounds),
        "fraction": ClassMean(phantom_C, tokens_C, by=("sign", "bin")),
        "clip_fraction": Share(clipped_N.sum(), n, bounds),
        "missed_fraction": Share(missed_N.sum(), n, bounds),
    }
