"""What the ratio of a clipped loss is made of, and which tokens its clip silences for their rounding alone.

With a shadow, a forward of the trainer's present weights in the rollout's precision:

    beta  = log π(yₜ) - log shadow(yₜ)     same weights, two precisions
    alpha = log shadow(yₜ) - log μ(yₜ)     same precision, the policy's real change

so alpha + beta = log π - log μ, the log-ratio of a loss in bypass mode. A token is clipped when PPO's clipped branch is
taken and its gradient is exactly zero: A > 0 and r > 1 + ε_high, or A < 0 and r < 1 - ε_low. It is phantom-clipped when
that is so with beta and would not be without. Sources: docs/metrics.md.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from verl_precision.losses.settings import require_clip_range
from verl_precision.mismatch.merging import PartialSums, Sums, added, finite, largest, ratio, setting, smallest, spread
from verl_precision.mismatch.packing import Chunk, packed_chunks
from verl_precision.mismatch.token_bins import CLASSES, by_bin, by_sign, class_sums, class_totals, token_classes


@dataclasses.dataclass
class PhantomSums(Sums):
    """The mergeable state of all `phantom/...` metrics.

    Attributes:
        clip_low: ε_low in (0, 1], as the loss has it.
        clip_high: ε_high > 0.
    """

    clip_low: float = setting(0.2)
    clip_high: float = setting(0.28)
    nonfinite_tokens: float = added()
    positive_log_probs: float = added()
    alpha_sum: float = added()
    alpha_abs: float = added()
    alpha_squares: float = added()
    alpha_min: float = smallest()
    alpha_max: float = largest()
    beta_squares: float = added()
    beta_min: float = smallest()
    beta_max: float = largest()
    beta_beyond_clip: float = added()
    clipped: float = added()
    missed: float = added()
    class_tokens: Tensor = added(CLASSES)
    class_beta: Tensor = added(CLASSES)
    class_beta_abs: Tensor = added(CLASSES)
    class_phantom: Tensor = added(CLASSES)

    def __post_init__(self) -> None:
        """Check the clip range."""
        require_clip_range(self.clip_low, self.clip_high)

    def update(
        self,
        trainer_log_probs: Tensor,
        shadow_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor,
        ratio_log_probs: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """Add a batch, or a part of one.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ; θ) in nats, or nested (torch.jagged): what the loss sees.
            shadow_log_probs: likewise, of the same weights in the rollout's precision.
            rollout_log_probs: likewise, log μ(yₜ).
            response_mask: [B, T], nonzero where a token counts; with nested log-probs nested, or None for all.
            advantages: [B, T], nested, or [B]. A token without a sign (0, NaN) is never clipped.
            ratio_log_probs: what the loss's ratio is taken against, log r = log π - this. None: the rollout's, as in
                bypass mode. Without beta the ratio is log shadow - this. Old log-probs that the trainer itself computed
                have a beta of their own, which cancels much of this one in r and not in the ratio without beta.
            chunk_tokens: tokens at a time; None fits the device.

        Masked tokens never matter. Valid tokens with a NaN, an infinite or a positive log-prob (any of those given) are
        counted and left out.

        Raises:
            ConfigurationError: if shapes, layouts or types do not fit.
        """
        log_probs = {
            "trainer_log_probs": trainer_log_probs,
            "shadow_log_probs": shadow_log_probs,
            "rollout_log_probs": rollout_log_probs,
        }
        if ratio_log_probs is not None:
            log_probs["ratio_log_probs"] = ratio_log_probs
        chunks = packed_chunks(log_probs, response_mask, advantages, chunk_tokens)
        clip = (self.clip_low, self.clip_high)
        vars(self).update(vars(self.merge(_measure(chunks, *clip))))

    def metrics(self) -> dict[str, float]:
        """Return the metrics, `phantom/<name>`; those undefined on what was added are left out."""
        n = self.class_tokens.sum().item()
        found: dict[str, float | None] = {
            "tokens": n,
            "nonfinite_tokens": self.nonfinite_tokens,
            "positive_log_probs": self.positive_log_probs,
        }
        if n:
            beta_sum = self.class_beta.sum().item()
            found |= {
                "alpha_mean": self.alpha_sum / n,
                "alpha_abs_mean": self.alpha_abs / n,
                "alpha_std": spread(self.alpha_sum, self.alpha_squares, n),
                "alpha_min": self.alpha_min,
                "alpha_max": self.alpha_max,
                "beta_mean": beta_sum / n,
                "beta_abs_mean": self.class_beta_abs.sum().item() / n,
                "beta_std": spread(beta_sum, self.beta_squares, n),
                "beta_min": self.beta_min,
                "beta_max": self.beta_max,
                "beta_beyond_clip_fraction": self.beta_beyond_clip / n,
                "fraction": self.class_phantom.sum().item() / n,
                "clip_fraction": self.clipped / n,
                "missed_fraction": self.missed / n,
            }
            found |= self._class_metrics()
        return finite({f"phantom/{name}": value for name, value in found.items()})

    def _class_metrics(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        phantom, beta = by_sign(self.class_phantom), by_sign(self.class_beta)
        for name, count in by_sign(self.class_tokens).items():
            found[f"fraction_{name}"] = ratio(phantom[name], count)
            found[f"beta_mean_{name}"] = ratio(beta[name], count)
        phantom, beta_abs = by_bin(self.class_phantom), by_bin(self.class_beta_abs)
        for name, count in by_bin(self.class_tokens).items():
            found[f"{name}/fraction"] = ratio(phantom[name], count)
            found[f"{name}/beta_abs_mean"] = ratio(beta_abs[name], count)
        return found


@torch.no_grad()
def _measure(chunks: Iterable[Callable[[], Chunk]], clip_low: float, clip_high: float) -> PhantomSums:
    """Return the state of some chunks."""
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf  # ε_low = 1: no ratio is below 0
    high = math.log1p(clip_high)
    counts: dict[str, Any] = {"nonfinite_tokens": 0.0, "positive_log_probs": 0.0}
    sums = PartialSums(PhantomSums)
    for pack in chunks:
        chunk = pack()
        counts["nonfinite_tokens"] += chunk.nonfinite
        counts["positive_log_probs"] += chunk.positive
        trainer_N, shadow_N, mu_N = chunk.log_probs[:3]
        if not mu_N.numel() or chunk.advantages_N is None:
            continue
        against_N = chunk.log_probs[-1] if len(chunk.log_probs) == 4 else mu_N
        alpha_N, beta_N = shadow_N - mu_N, trainer_N - shadow_N
        clipped_N = _clipped(trainer_N - against_N, chunk.advantages_N, low, high)
        clipped_without_beta_N = _clipped(shadow_N - against_N, chunk.advantages_N, low, high)
        classes_N = token_classes(mu_N, chunk.advantages_N)
        classes = class_totals(classes_N, beta_N)
        alpha_min, alpha_max = alpha_N.aminmax()
        beta_min, beta_max = beta_N.aminmax()
        sums.add(
            alpha_sum=alpha_N.sum(),
            alpha_abs=alpha_N.abs().sum(),
            alpha_squares=alpha_N.dot(alpha_N),
            alpha_min=alpha_min,
            alpha_max=alpha_max,
            beta_squares=beta_N.dot(beta_N),
            beta_min=beta_min,
            beta_max=beta_max,
            beta_beyond_clip=((beta_N > high) | (beta_N < low)).double().sum(),
            clipped=clipped_N.double().sum(),
            missed=(clipped_without_beta_N & ~clipped_N).double().sum(),
            class_tokens=classes["tokens"],
            class_beta=classes["sum"],
            class_beta_abs=classes["abs"],
            class_phantom=class_sums(classes_N, (clipped_N & ~clipped_without_beta_N).double()),
        )
    return PhantomSums(clip_low, clip_high, **counts, **sums.result())


def _clipped(log_ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    return ((log_ratio_N > high) & (advantages_N > 0)) | ((log_ratio_N < low) & (advantages_N < 0))
