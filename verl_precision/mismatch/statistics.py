"""Statistics of the gap between the trainer's and the rollout's log-probabilities of the same tokens.

    g = log π(yₜ) - log μ(yₜ) at each token,  s = Σₜ gₜ of each response

π is the trainer's policy, μ the rollout's, yₜ the tokens the rollout sampled. docs/metrics.md defines every metric.
One pass over chunks of responses; everything is computed in float64 and kept as sums that merge.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.losses.settings import require_threshold
from verl_precision.mismatch.histogram import BINS, absolute, bit_counts, gap_counts, gap_edges, quantile
from verl_precision.mismatch.merging import (
    PartialSums,
    Sums,
    added,
    finite,
    largest,
    ratio,
    setting,
    smallest,
    spread,
)
from verl_precision.mismatch.packing import Chunk, packed_chunks
from verl_precision.mismatch.token_bins import CLASSES, by_bin, by_sign, class_totals, token_classes
from verl_precision.mismatch.token_sums import sequence_sums, token_sums

# Below this variance (a standard deviation of 1e-6) probabilities are constant up to rounding, and a correlation noise.
SMALLEST_VARIANCE = 1e-12

GAP_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
ABS_GAP_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclasses.dataclass
class MismatchSums(Sums):
    """The mergeable state of all `mismatch/...` metrics.

    Example:
        >>> sums = MismatchSums(ratio_threshold=3.0)
        >>> sums.update(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2))
        >>> sums.metrics()["mismatch/log_prob_gap_mean"]
        0.25

    Attributes:
        ratio_threshold: C >= 1 of the shares of responses within C; the paper's is 3.
        ratio_sum: Σ e^(s - m), m the largest s (`sequence_max`), so that no exponent is positive.
        ratio_squares: Σ e^(2(s - m)).
    """

    ratio_threshold: float = setting(3.0)
    nonfinite_tokens: float = added()
    positive_log_probs: float = added()
    gap_squares: float = added()
    gap_min: float = smallest()
    gap_max: float = largest()
    k3: float = added()
    ratio_distance: float = added()
    probs: float = added()
    probs_squares: float = added()
    probs_diff: float = added()
    probs_diff_abs: float = added()
    probs_diff_squares: float = added()
    probs_cross: float = added()
    probs_diff_min: float = smallest()
    probs_diff_max: float = largest()
    class_tokens: Tensor = added(CLASSES)
    class_gap: Tensor = added(CLASSES)
    class_gap_abs: Tensor = added(CLASSES)
    gap_histogram: Tensor = added(BINS)
    responses: float = added()
    sequence_sum: float = added()
    sequence_abs: float = added()
    sequence_squares: float = added()
    sequence_min: float = smallest()
    sequence_max: float = largest()
    length_sum: float = added()
    length_squares: float = added()
    length_cross: float = added()
    at_most_c: float = added()
    within_c: float = added()
    ratio_sum: float = added()
    ratio_squares: float = added()

    def __post_init__(self) -> None:
        """Check C."""
        require_threshold(self.ratio_threshold, "ratio_threshold")

    @property
    def tokens(self) -> float:
        """Valid tokens that were not left out."""
        return self.class_tokens.sum().item()

    def update(
        self,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """Add a batch, or a part of one; whole responses, because a response's ratio cannot be merged from pieces.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ) in nats, or nested (torch.jagged).
            rollout_log_probs: likewise, log μ(yₜ).
            response_mask: [B, T], nonzero where a token counts; with nested log-probs nested, or None for all.
            advantages: [B, T], nested, or [B]; only the sign matters. None leaves out the metrics by sign.
            chunk_tokens: tokens at a time; None fits the device. Does not change the result beyond float64 rounding.

        Masked tokens never matter, whatever they hold. Valid tokens with a NaN, an infinite or a positive log-prob are
        counted and left out, and their response is left out of the sequence-level statistics. Empty batches and
        responses add nothing. A NaN advantage has no sign.

        Raises:
            ConfigurationError: if shapes, layouts or types do not fit.
        """
        log_probs = {"trainer_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
        chunks = packed_chunks(log_probs, response_mask, advantages, chunk_tokens)
        vars(self).update(vars(self.merge(_measure(chunks, self.ratio_threshold))))

    def merge(self, other: Self) -> Self:
        """Return the state of both batches together; the ratios are brought to the larger of the two maxima first."""
        merged = super().merge(other)
        merged.ratio_sum = merged.ratio_squares = 0.0
        for part in (self, other):
            if part.responses:
                scale = math.exp(part.sequence_max - merged.sequence_max)
                merged.ratio_sum += part.ratio_sum * scale
                merged.ratio_squares += part.ratio_squares * scale**2
        return merged

    def metrics(self) -> dict[str, float]:
        """Return the metrics, `mismatch/<name>`; those undefined on what was added are left out."""
        found: dict[str, float | None] = {
            "tokens": self.tokens,
            "responses": self.responses,
            "nonfinite_tokens": self.nonfinite_tokens,
            "positive_log_probs": self.positive_log_probs,
        }
        if self.tokens:
            found |= self._gap_metrics() | self._probability_metrics() | self._class_metrics()
        if self.responses:
            found |= self._sequence_metrics()
        return finite({f"mismatch/{name}": value for name, value in found.items()})

    def histograms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `mismatch/log_prob_gap` -> (edges [K + 1] in nats, -inf to inf; counts [K] of tokens)."""
        return {"mismatch/log_prob_gap": (gap_edges(), self.gap_histogram.clone())}

    def _gap_metrics(self) -> dict[str, float | None]:
        n, edges, folded = self.tokens, gap_edges(), absolute(self.gap_histogram)
        total = self.class_gap.sum().item()
        found: dict[str, float | None] = {
            "log_prob_gap_mean": total / n,
            "log_prob_gap_std": spread(total, self.gap_squares, n),
            "log_prob_gap_abs_mean": self.class_gap_abs.sum().item() / n,
            "log_prob_gap_min": self.gap_min,
            "log_prob_gap_max": self.gap_max,
            "k1_kl": -total / n,
            "k3_kl": self.k3 / n,
            "total_variation": self.ratio_distance / n / 2,
        }
        for name, q in GAP_QUANTILES.items():
            value = quantile(edges, self.gap_histogram, q, self.gap_min, self.gap_max)
            found[f"log_prob_gap_{name}"] = value
        largest_abs = max(self.gap_max, -self.gap_min)
        for name, q in ABS_GAP_QUANTILES.items():
            found[f"log_prob_gap_abs_{name}"] = quantile(*folded, q, 0.0, largest_abs)
        return found

    def _probability_metrics(self) -> dict[str, float | None]:
        """With d = π - μ: var π = var μ + 2 cov(μ, d) + var d, which keeps the digits of a small d."""
        n = self.tokens
        mu, d = self.probs / n, self.probs_diff / n
        var_mu, var_d = self.probs_squares / n - mu**2, self.probs_diff_squares / n - d**2
        cov = self.probs_cross / n - mu * d
        var_pi = var_mu + 2 * cov + var_d
        pearson = None
        if min(var_mu, var_pi) > SMALLEST_VARIANCE:
            pearson = max(-1.0, min(1.0, (var_mu + cov) / math.sqrt(var_mu * var_pi)))
        return {
            "probs_diff_abs_mean": self.probs_diff_abs / n,
            "probs_diff_min": self.probs_diff_min,
            "probs_diff_max": self.probs_diff_max,
            "probs_pearson": pearson,
        }

    def _class_metrics(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        tokens, gap_abs = by_bin(self.class_tokens), by_bin(self.class_gap_abs)
        for name, count in tokens.items():
            found[f"{name}/token_fraction"] = count / self.tokens
            found[f"{name}/log_prob_gap_abs_mean"] = ratio(gap_abs[name], count)
        tokens, gap = by_sign(self.class_tokens), by_sign(self.class_gap)
        return found | {f"log_prob_gap_mean_{sign}": ratio(gap[sign], count) for sign, count in tokens.items()}

    def _sequence_metrics(self) -> dict[str, float | None]:
        n = self.responses
        effective = self.ratio_sum**2 / self.ratio_squares
        length_variation = n * self.length_squares - self.length_sum**2
        covariation = n * self.length_cross - self.length_sum * self.sequence_abs
        return {
            "sequence_log_ratio_mean": self.sequence_sum / n,
            "sequence_log_ratio_std": spread(self.sequence_sum, self.sequence_squares, n),
            "sequence_log_ratio_min": self.sequence_min,
            "sequence_log_ratio_max": self.sequence_max,
            "sequence_log_ratio_abs_per_1k_tokens": ratio(1000 * covariation, length_variation),
            "sequence_ratio_at_most_c": self.at_most_c / n,
            "sequence_ratio_within_c": self.within_c / n,
            "sequence_ess": effective,
            "sequence_ess_fraction": effective / n,
        }


@torch.no_grad()
def _measure(chunks: Iterable[Callable[[], Chunk]], ratio_threshold: float) -> MismatchSums:
    """Return the state of some chunks; the sums stay on the device until the last of them."""
    counts: dict[str, Any] = {"nonfinite_tokens": 0.0, "positive_log_probs": 0.0}
    sums, responses = PartialSums(MismatchSums), []
    for pack in chunks:
        chunk = pack()
        counts["nonfinite_tokens"] += chunk.nonfinite
        counts["positive_log_probs"] += chunk.positive
        pi_N, mu_N = chunk.log_probs
        if not mu_N.numel():
            continue
        gap_N = pi_N - mu_N
        classes = class_totals(token_classes(mu_N, chunk.advantages_N), gap_N)
        sums.add(
            **token_sums(pi_N, mu_N, gap_N),
            gap_histogram=bit_counts(gap_N),
            class_tokens=classes["tokens"],
            class_gap=classes["sum"],
            class_gap_abs=classes["abs"],
        )
        s_R = torch.segment_reduce(gap_N, "sum", lengths=chunk.lengths_R)
        responses.append(torch.stack([s_R, chunk.lengths_R.double()])[:, chunk.whole_R])
    if not responses:
        return MismatchSums(ratio_threshold, **counts)
    found = sums.result()
    found["gap_histogram"] = gap_counts(found["gap_histogram"])
    s_B, lengths_B = torch.cat(responses, dim=1).cpu()
    found |= sequence_sums(s_B, lengths_B, ratio_threshold)
    return MismatchSums(ratio_threshold, **counts, **found)
