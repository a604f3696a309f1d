"""Statistics of the gap between the trainer's and the rollout's log-probabilities of the same tokens.

    g = log π(yₜ) - log μ(yₜ) at each token,  s = Σₜ gₜ of each response

π is the trainer's policy, μ the rollout's, yₜ the tokens the rollout sampled. docs/metrics.md defines every metric.
To add one, add an entry to `_token_statistics` or `_response_statistics`, and a row to that page.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.losses.settings import require_threshold
from verl_precision.mergeable import (
    Count,
    Deviation,
    Maximum,
    Mean,
    Minimum,
    Share,
    Statistic,
    StatisticSet,
    merge_by_name,
)
from verl_precision.mismatch.histogram import GapHistogram, gap_counts, gap_edges
from verl_precision.mismatch.kinds import Correlation, Perplexity, RatioSampleSize, Slope
from verl_precision.mismatch.packing import Chunk, packed_chunks
from verl_precision.mismatch.token_bins import BinShares, ClassMean, class_totals, token_classes

# Guard: in k3 and in total variation a gap above 600 nats counts as 600. e^600 = 4e260 can still be summed over 1e40
# tokens in float64. `log_prob_gap_max` shows such a gap as it is.
LARGEST_GAP = 600.0


@dataclass(frozen=True)
class MismatchStatistics(StatisticSet):
    """All `mismatch/...` metrics, mergeable.

    Example:
        >>> pi, mu = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> MismatchStatistics.measure(pi, mu, torch.ones(1, 2)).metrics()["mismatch/log_prob_gap_mean"]
        0.25
    """

    prefix: ClassVar[str] = "mismatch/"

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor | None = None,
        ratio_threshold: float = 3.0,
        chunk_tokens: int | None = None,
    ) -> Self:
        """Measure a batch, or a part of one; whole responses, because a response's ratio cannot be merged from pieces.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ) in nats, or nested (torch.jagged).
            rollout_log_probs: Likewise, log μ(yₜ).
            response_mask: [B, T], nonzero where a token counts; with nested log-probs nested, or None for all.
            advantages: [B, T], nested, or [B]; only the sign matters. None leaves out the metrics by sign.
            ratio_threshold: C >= 1 of the shares of responses within C; the paper's is 3.
            chunk_tokens: Tokens at a time; None fits the device. Does not change the result beyond float64 rounding.

        Returns:
            The statistics, on the CPU. Masked tokens never matter, whatever they hold. Valid tokens with a NaN, an
            infinite or a positive log-prob are counted and left out, and their response is left out of the statistics
            of responses. A NaN advantage has no sign.

        Raises:
            ConfigurationError: If shapes, layouts, types or C do not fit.
        """
        require_threshold(ratio_threshold, "ratio_threshold")
        log_probs = {"trainer_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
        chunks = packed_chunks(log_probs, response_mask, advantages, chunk_tokens)
        pieces, log_ratios, lengths = zip(*map(_measure_chunk, chunks), strict=True)
        responses = _response_statistics(torch.cat(log_ratios), torch.cat(lengths), ratio_threshold)
        return cls.on_cpu({**merge_by_name(pieces), **responses})

    def histograms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `mismatch/log_prob_gap` -> (edges [K + 1] in nats, -inf to inf; counts [K] of tokens), if measured."""
        histogram = self.statistics.get("log_prob_gap")
        return {"mismatch/log_prob_gap": (gap_edges(), histogram.counts)} if histogram else {}  # type: ignore[attr-defined]


def _measure_chunk(chunk: Chunk) -> tuple[dict[str, Statistic], Tensor, Tensor]:
    """Return the statistics of a chunk's tokens, and log ρ and length of its whole responses, float64 on the CPU."""
    pi_N, mu_N = chunk.log_probs
    if not len(chunk):
        nothing = torch.zeros(0, dtype=torch.float64)
        return chunk.counts, nothing, nothing
    gap_N = pi_N - mu_N
    statistics = {**chunk.counts, **_token_statistics(pi_N, mu_N, gap_N, chunk.advantages_N)}
    log_ratio_R = torch.segment_reduce(gap_N, "sum", lengths=chunk.lengths_R)
    return statistics, log_ratio_R[chunk.whole_R].cpu(), chunk.lengths_R[chunk.whole_R].double().cpu()


def _token_statistics(pi_N: Tensor, mu_N: Tensor, gap_N: Tensor, advantages_N: Tensor | None) -> dict[str, Statistic]:
    """Return metric -> statistic, of the tokens of one chunk; arrays are used again and few live at once, for speed."""
    n = gap_N.new_full((), len(gap_N))
    tokens_C, gap_C, gap_abs_C = class_totals(token_classes(mu_N, advantages_N), gap_N)
    histogram, squares, (gap_min, gap_max) = gap_counts(gap_N), gap_N.dot(gap_N), gap_N.aminmax()
    capped_N = gap_N if gap_max <= LARGEST_GAP else gap_N.clamp(max=LARGEST_GAP)
    excess_N = capped_N.expm1()  # e^g - 1; taking 1 from e^g would lose the digits of a small g
    k3, distance = excess_N.sum() - capped_N.sum(), excess_N.abs().sum()
    mu, probs_N = mu_N.sum(), mu_N.exp()
    if gap_max <= LARGEST_GAP:
        diff_N = excess_N.mul_(probs_N)  # π - μ = μ (e^g - 1)
    else:
        diff_N = torch.exp(pi_N, out=excess_N).sub_(probs_N)
    diff, (diff_min, diff_max) = diff_N.sum(), diff_N.aminmax()
    return {
        "log_prob_gap_mean": ClassMean(gap_C, tokens_C, by=("sign",)),
        "log_prob_gap_abs_mean": ClassMean(gap_abs_C, tokens_C, by=("bin",)),
        "log_prob_gap_std": Deviation(gap_C, n, squares),
        "log_prob_gap_min": Minimum(gap_min),
        "log_prob_gap_max": Maximum(gap_max),
        "log_prob_gap": GapHistogram(histogram, gap_min, gap_max),
        "token_fraction": BinShares(tokens_C),
        "trainer_perplexity": Perplexity(-mu - gap_C.sum(), n),  # log π = log μ + g: one pass less
        "rollout_perplexity": Perplexity(-mu, n),
        "k1_kl": Mean(-gap_C, n),
        "k3_kl": Mean(k3, n),
        "total_variation": Mean(distance / 2, n),
        "probs_diff_abs_mean": Mean(diff_N.abs().sum(), n),
        "probs_diff_min": Minimum(diff_min),
        "probs_diff_max": Maximum(diff_max),
        "probs_pearson": Correlation(
            n, probs_N.sum(), probs_N.dot(probs_N), diff, diff_N.dot(diff_N), probs_N.dot(diff_N)
        ),
    }


def _response_statistics(log_ratio_B: Tensor, length_B: Tensor, ratio_threshold: float) -> dict[str, Statistic]:
    """Return metric -> statistic, of whole responses: s = log ρ of each, and its tokens."""
    n = log_ratio_B.new_full((), len(log_ratio_B))
    if not n:
        return {"responses": Count(n)}
    total, squares, abs_B = log_ratio_B.sum(), log_ratio_B.dot(log_ratio_B), log_ratio_B.abs()
    low, high = log_ratio_B.aminmax()
    ratio_B, bound, bounds = (log_ratio_B - high).exp(), math.log(ratio_threshold), (ratio_threshold,)
    at_most, within = (log_ratio_B <= bound).sum(), (abs_B <= bound).sum()
    return {
        "responses": Count(n),
        "sequence_log_ratio_mean": Mean(total, n),
        "sequence_log_ratio_std": Deviation(total, n, squares),
        "sequence_log_ratio_min": Minimum(low),
        "sequence_log_ratio_max": Maximum(high),
        "sequence_log_ratio_abs_per_1k_tokens": Slope(
            1000.0, n, length_B.sum(), length_B.dot(length_B), abs_B.sum(), length_B.dot(abs_B)
        ),
        "sequence_ratio_at_most_c": Share(at_most, n, bounds),
        "sequence_ratio_within_c": Share(within, n, bounds),
        "sequence_ess": RatioSampleSize(n, high, ratio_B.sum(), ratio_B.dot(ratio_B)),
    }
