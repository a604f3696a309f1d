"""Statistics of the gap between the trainer's and the rollout's log-probabilities of the same tokens.

    g = log π(yₜ) - log μ(yₜ) at each token,  s = Σₜ gₜ of each response

π is the trainer's policy, μ the rollout's, yₜ the tokens the rollout sampled. docs/metrics.md defines every metric.
To add a metric, add an entry to `_token_statistics` or `_response_statistics`, and a row to that page; new sums over
tokens go into `token_sums.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from verl_precision.base import mergeable
from verl_precision.mismatch import fused, token_sums
from verl_precision.mismatch.fused import Measured
from verl_precision.mismatch.packing import Chunk, FlatBatch, flattened, packed_chunks
from verl_precision.mismatch.token_sums import BinShares, ClassMean, GapHistogram, TokenSums, sums_of

C = 3.0  # the paper's bound of a response's ratio


@dataclass(frozen=True)
class MismatchStatistics(mergeable.StatisticSet):
    """All `mismatch/...` metrics, mergeable.

    Example:
        >>> pi, mu = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> MismatchStatistics.measure(pi, mu, torch.ones(1, 2)).metrics()["mismatch/log_prob_gap_mean"]
        0.25
    """

    prefix: ClassVar[str] = "mismatch/"

    @classmethod
    def measure(
        cls,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor | None = None,
        ended: Tensor | None = None,
    ) -> Self:
        """Measure a batch, or a part of one; whole responses, because a response's ratio cannot be merged from pieces.

        Args:
            trainer_log_probs: [B, T] floating, log π(yₜ) in nats, or nested (torch.jagged).
            rollout_log_probs: Likewise, log μ(yₜ).
            response_mask: [B, T], nonzero where a token counts; with nested log-probs nested, or None for all.
            advantages: [B, T], nested, or [B]; only the sign matters. None leaves out the metrics by sign.
            ended: [B] bool, the responses that came to an end by themselves; the others are left out of the metrics of
                final tokens. None for all.

        Returns:
            The statistics, on the CPU. The values of masked tokens have no effect. Valid tokens with a NaN, an
            infinite or a positive log-prob are counted and left out, and their response is left out of the statistics
            of responses. A NaN advantage has no sign.

        Raises:
            ConfigurationError: If shapes, layouts or types do not fit.
        """
        log_probs = trainer_log_probs, rollout_log_probs
        return cls.of_batch(flattened(*log_probs, mask=response_mask, advantages=advantages, ended=ended))

    @classmethod
    @torch.no_grad()
    def of_batch(cls, batch: FlatBatch) -> Self:
        """Return the statistics of a batch of the trainer's and the rollout's log-probs."""
        found = (fused.measure if fused.kernel_for(batch.mask) else _measure_with_torch)(batch)
        tokens = _token_statistics(found.sums) if found.sums is not None else {}
        responses = _response_statistics(found.log_ratio_B, found.length_B)
        final_gap_E = found.final_gap_B
        if batch.ended_B is not None:
            final_gap_E = final_gap_E[batch.ended_B.cpu()[found.whole_B]]
        final = mergeable.Mean(final_gap_E.sum(), final_gap_E.new_full((), len(final_gap_E)))
        return cls.on_cpu({**found.counts, **tokens, **responses, "final_token_gap_mean": final})

    def totals(self, names: Iterable[str]) -> dict[str, mergeable.Statistic]:
        """Return statistics of counts and means by the names of their metrics, without their parts by sign or bin."""
        found = {name: self.statistics.get(name.removeprefix(self.prefix)) for name in names}
        return {
            name: mergeable.Mean(each.total.sum(), each.number.sum()) if isinstance(each, mergeable.Mean) else each
            for name, each in found.items()
            if each is not None
        }


def _measure_with_torch(batch: FlatBatch) -> Measured:
    counts, sums, *of_responses = zip(*map(_measure_chunk, packed_chunks(batch)), strict=True)
    merged = mergeable.merge_by_name({"": part} for part in sums if part is not None)
    return Measured(mergeable.merge_by_name(counts), merged.get(""), *map(torch.cat, of_responses))


def _measure_chunk(chunk: Chunk) -> Measured:
    pi_N, mu_N = chunk.log_probs
    if not len(chunk):
        nothing = torch.zeros(0, dtype=torch.float64)
        return Measured(chunk.counts, None, chunk.whole_R.cpu(), nothing, nothing, nothing)
    gap_N, whole_R = pi_N - mu_N, chunk.whole_R
    log_ratio_R = torch.segment_reduce(gap_N, "sum", lengths=chunk.lengths_R)[whole_R]
    of_whole = (log_ratio_R, chunk.lengths_R[whole_R].double(), gap_N[chunk.last_R[whole_R]])
    sums = sums_of(pi_N, mu_N, gap_N, chunk.advantages_N)
    return Measured(chunk.counts, sums, whole_R.cpu(), *(part.cpu() for part in of_whole))


def _token_statistics(sums: TokenSums) -> dict[str, mergeable.Statistic]:
    n, tokens_C, gap_C = sums.n, sums.tokens_C, sums.gap_C
    return {
        "log_prob_gap_mean": ClassMean(gap_C, tokens_C, by=("sign",)),
        "log_prob_gap_abs_mean": ClassMean(sums.gap_abs_C, tokens_C, by=("bin",)),
        **mergeable.spread("log_prob_gap", gap_C, n, sums.gap_squares, (sums.gap_min, sums.gap_max)),
        "log_prob_gap": GapHistogram(sums.histogram, sums.gap_min, sums.gap_max),
        "token_fraction": BinShares(tokens_C),
        "trainer_perplexity": mergeable.Perplexity(-sums.mu - gap_C.sum(), n),  # log π = log μ + g: one pass less
        "rollout_perplexity": mergeable.Perplexity(-sums.mu, n),
        "equal_fraction": mergeable.Mean(sums.equal, n),
        "k1_kl": mergeable.Mean(-gap_C, n),
        "k3_kl": mergeable.Mean(sums.k3, n),
        "total_variation": mergeable.Mean(sums.distance / 2, n),
        "chi_square": mergeable.Mean(sums.chi_square, n),
        "probs_diff_abs_mean": mergeable.Mean(sums.diff_abs, n),
        "probs_diff_min": mergeable.Minimum(sums.diff_min),
        "probs_diff_max": mergeable.Maximum(sums.diff_max),
        "probs_pearson": mergeable.Correlation(
            n, sums.probs, sums.probs_squares, sums.diff, sums.diff_squares, sums.probs_times_diff
        ),
    }


def _response_statistics(log_ratio_B: Tensor, length_B: Tensor) -> dict[str, mergeable.Statistic]:
    """Return metric -> statistic of whole responses, from s = log ρ and the number of tokens of each."""
    n = log_ratio_B.new_full((), len(log_ratio_B))
    if not n:
        return {"responses": mergeable.Count(n)}
    total, abs_B, (low, high) = log_ratio_B.sum(), log_ratio_B.abs(), log_ratio_B.aminmax()
    ratio_B, bound = (log_ratio_B - high).exp(), math.log(C)
    # a response beyond e^300 counts as e^300, so that the sum of squares stays finite
    chi_square_B = (2 * log_ratio_B.clamp(max=token_sums.LARGEST_GAP_SQUARED)).expm1()
    return {
        "responses": mergeable.Count(n),
        "sequence_log_ratio_mean": mergeable.Mean(total, n),
        **mergeable.spread("sequence_log_ratio", total, n, log_ratio_B.dot(log_ratio_B), (low, high)),
        "sequence_log_ratio_abs_per_1k_tokens": mergeable.Slope(
            1000.0, n, length_B.sum(), length_B.dot(length_B), abs_B.sum(), length_B.dot(abs_B)
        ),
        "sequence_ratio_at_most_c": mergeable.Mean((log_ratio_B <= bound).sum(), n),
        "sequence_ratio_within_c": mergeable.Mean((abs_B <= bound).sum(), n),
        "sequence_chi_square": mergeable.Mean(chi_square_B.sum(), n),
        "sequence_ess": mergeable.RatioSampleSize(n, high, ratio_B.sum(), ratio_B.dot(ratio_B)),
    }
