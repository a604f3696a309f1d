"""Mergeable parts of the token metrics: classes of tokens, the histogram of the gap, and sums.

A token's class is its probability in the rollout and the sign of its advantage: the precision gap is up to 50 times
larger on tokens of low probability, and it correlates with the advantage (source: docs/metrics.md).

The histogram has a fixed signed-log grid, so that the histograms of pieces add up to the histogram, and thus to the
quantiles, of the whole. From 2⁻³⁰ to 2¹² nats each octave of |g| has 16 bins of equal width, so a bin is at most 1/16
of its values wide; one bin has |g| < 2⁻³⁰ (9e-10), and one bin at each end has g beyond ±4096. The bits of g as float32
(sign, exponent, first four bits of the mantissa) give the bin, without search or logarithm.

`fused_kernel.py` fills the same sums in one pass. A new sum is a field here, an entry at its place in `sums_of`, and a
line in `fused_kernel._sum`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_precision.base.mergeable import Mean, Statistic, added, largest, same, smallest

# Decades of μ(yₜ): likely tokens first. A token exactly on an edge may fall on either side, as float64 rounds its log.
PROBABILITY_BINS = ("prob_1e-1_1", "prob_1e-2_1e-1", "prob_1e-3_1e-2", "prob_1e-4_1e-3", "prob_0_1e-4")
SIGN_COUNT = 3  # negative, none, positive
CLASSES = len(PROBABILITY_BINS) * SIGN_COUNT
NATS_TO_DECADES, LAST_BIN = -1 / math.log(10), len(PROBABILITY_BINS) - 1

LOWEST, HIGHEST = -30, 12  # octaves of the histogram, as powers of 2
PER_OCTAVE = 16
# The bits of a float32, as an integer, are shifted by BITS_LEFT; `HALF` is then the number of bins of each sign.
BITS_LEFT, HALF = 19, 1 << 12
_LOW, _HIGH = (127 + LOWEST) * PER_OCTAVE, (127 + HIGHEST) * PER_OCTAVE  # 127: the exponent's bias
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
ABS_QUANTILES = {"abs_p50": 0.5, "abs_p90": 0.9, "abs_p99": 0.99, "abs_p999": 0.999}

# Guard: in k3 and in total variation a gap above 600 nats counts as 600. e^600 = 4e260 can still be summed over 1e40
# tokens in float64. `log_prob_gap_max` shows such a gap as it is.
LARGEST_GAP = 600.0
LARGEST_GAP_SQUARED = LARGEST_GAP / 2  # the same for chi-square, which squares the ratio


def token_classes(rollout_log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return [N] int32, 3 x bin + sign; an advantage of 0 or NaN has no sign."""
    bins_N = (rollout_log_probs_N * NATS_TO_DECADES).clamp_(max=LAST_BIN)
    return bins_N.to(torch.int32).mul_(SIGN_COUNT).add_(1).add_(advantages_N.sign().to(torch.int32))  # NaN: 0


def class_totals(classes_N: Tensor, values_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [CLASSES] float64 each: the number of values of each class, their sum, and the sum of |value|."""
    signed_N = classes_N.add(values_N.signbit(), alpha=CLASSES)  # negative ones apart: one pass gives both sums
    counts = torch.bincount(signed_N, minlength=2 * CLASSES)
    return totals_of_signed(counts, torch.bincount(signed_N, weights=values_N, minlength=2 * CLASSES))


def totals_of_signed(counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class totals from counts and sums, [2 CLASSES] each: positive values first, then negative values."""
    positive, negative = sums.view(2, CLASSES)
    return counts.view(2, CLASSES).sum(dim=0).double(), positive + negative, positive - negative


@dataclass(frozen=True)
class ClassMean(Mean):
    """A mean over all tokens, and over those of each sign, bin, or both; total and number are [CLASSES]."""

    by: tuple[str, ...] = same()  # of "sign" and "bin"

    def values(self, name: str) -> dict[str, float]:
        """Return `<name>`, `<name>_<sign>` of both signs, and `<bin>/<name>` of all bins."""
        found = {name: self.value()}
        if "sign" in self.by:
            negative, _, positive = self._means_over(0)
            found |= {f"{name}_positive_advantage": positive, f"{name}_negative_advantage": negative}
        if "bin" in self.by:
            found |= _by_bin(name, self._means_over(1))
        return found

    def _means_over(self, dim: int) -> list[float]:
        total, number = (part.view(-1, SIGN_COUNT).sum(dim=dim) for part in (self.total, self.number))
        return (total / number).tolist()


@dataclass(frozen=True)
class BinShares(Statistic):
    """The share of the tokens in each bin."""

    tokens: Tensor = added()

    def values(self, name: str) -> dict[str, float]:
        """Return `<bin>/<name>` of all bins."""
        return _by_bin(name, (self.tokens.view(-1, SIGN_COUNT).sum(dim=1) / self.tokens.sum()).tolist())


def _by_bin(name: str, values: list[float]) -> dict[str, float]:
    return {f"{bin_name}/{name}": value for bin_name, value in zip(PROBABILITY_BINS, values, strict=True)}


@dataclass(frozen=True)
class GapHistogram(Statistic):
    """The number of gaps in each bin, as `gap_counts` returns it, and the smallest and largest of them."""

    counts: Tensor = added()
    low: Tensor = smallest()
    high: Tensor = largest()

    def values(self, name: str) -> dict[str, float]:
        """Return the quantiles of g, `<name>_p..`, and of |g|, `<name>_abs_p..`; each is at most half a bin off."""
        gaps = gap_centres().clamp(self.low, self.high)
        found = {label: quantile(gaps, self.counts, q) for label, q in QUANTILES.items()}
        found |= {label: quantile(gaps.abs(), self.counts, q) for label, q in ABS_QUANTILES.items()}
        return {f"{name}_{label}": value for label, value in found.items()}


def gap_counts(gap_N: Tensor) -> Tensor:
    """Return the number of gaps (finite) in each bin, float64, from the lowest g to the highest."""
    bits_N = (gap_N.float().view(torch.int32) >> BITS_LEFT).add_(HALF)  # the sign bit makes it negative
    return counts_of_bits(torch.bincount(bits_N, minlength=2 * HALF))


def counts_of_bits(tokens: Tensor) -> Tensor:
    """Return the result of `gap_counts`, given the counts of the shifted bits: [2 HALF], negative gaps first."""
    negative, positive = tokens.split(HALF)
    ends = torch.stack([negative[_HIGH:].sum(), negative[:_LOW].sum() + positive[:_LOW].sum(), positive[_HIGH:].sum()])
    middle = negative[_LOW:_HIGH].flip(0), positive[_LOW:_HIGH]
    return torch.cat([ends[:1], middle[0], ends[1:2], middle[1], ends[2:]]).double()


def gap_centres() -> Tensor:
    """Return the middle of each bin in nats, float64; the outermost bins have infinity."""
    octaves = torch.arange(LOWEST, HIGHEST, dtype=torch.float64).exp2()
    steps = 1 + (torch.arange(PER_OCTAVE, dtype=torch.float64) + 0.5) / PER_OCTAVE
    positive = torch.cat([(octaves[:, None] * steps).flatten(), octaves.new_tensor([torch.inf])])
    return torch.cat([-positive.flip(0), octaves.new_zeros(1), positive])


def quantile(values: Tensor, counts: Tensor, q: float) -> float:
    """Return the q-quantile of values with these counts: the smallest x with F(x) ≥ q."""
    order = values.argsort()
    cumulated = counts[order].cumsum(0)
    return values[order][torch.searchsorted(cumulated, q * cumulated[-1])].item()


@dataclass(frozen=True)
class TokenSums(Statistic):
    """Sums over n tokens, float64: g = log π - log μ the gap, capped at `LARGEST_GAP` where it is an exponent."""

    n: Tensor = added()  # the number of tokens
    gap_squares: Tensor = added()  # g²
    k3: Tensor = added()  # e^g - 1 - g
    distance: Tensor = added()  # abs(e^g - 1)
    chi_square: Tensor = added()  # e^2g - 1
    mu: Tensor = added()  # log μ
    probs: Tensor = added()  # μ
    probs_squares: Tensor = added()  # μ²
    diff: Tensor = added()  # π - μ
    diff_abs: Tensor = added()  # abs(π - μ)
    diff_squares: Tensor = added()  # (π - μ)²
    probs_times_diff: Tensor = added()  # μ (π - μ)
    equal: Tensor = added()  # the number of tokens with g = 0
    gap_min: Tensor = smallest()
    diff_min: Tensor = smallest()
    gap_max: Tensor = largest()
    diff_max: Tensor = largest()
    tokens_C: Tensor = added()  # [CLASSES], the number of tokens of each class, their g and their abs(g)
    gap_C: Tensor = added()
    gap_abs_C: Tensor = added()
    histogram: Tensor = added()  # the number of gaps in each bin


def sums_of(pi_N: Tensor, mu_N: Tensor, gap_N: Tensor, advantages_N: Tensor) -> TokenSums:
    """Return the sums of one chunk's tokens, at least one, from log π, log μ (float64), and their difference.

    Only the sign of advantages matters.
    """
    of_classes = class_totals(token_classes(mu_N, advantages_N), gap_N)
    histogram, squares, (gap_min, gap_max) = gap_counts(gap_N), gap_N.dot(gap_N), gap_N.aminmax()
    capped_N, probs_N = gap_N.clamp(max=LARGEST_GAP), mu_N.exp()
    excess_N = capped_N.expm1()  # e^g - 1; a subtraction of 1 from e^g would lose the digits of a small g
    squared_N = excess_N if gap_max <= LARGEST_GAP_SQUARED else gap_N.clamp(max=LARGEST_GAP_SQUARED).expm1()
    chi_square = squared_N.dot(squared_N) + 2 * squared_N.sum()  # e^2g - 1 = (e^g - 1)² + 2 (e^g - 1)
    diff_N = torch.where(gap_N > LARGEST_GAP, pi_N.exp() - probs_N, probs_N * excess_N)  # π - μ = μ (e^g - 1)
    diff_min, diff_max = diff_N.aminmax()
    n, k3, distance = gap_N.new_full((), len(gap_N)), excess_N.sum() - capped_N.sum(), excess_N.abs().sum()
    of_probs = mu_N.sum(), probs_N.sum(), probs_N.dot(probs_N)
    of_diff = diff_N.sum(), diff_N.abs().sum(), diff_N.dot(diff_N), probs_N.dot(diff_N), (gap_N == 0).sum().double()
    extremes = gap_min, diff_min, gap_max, diff_max
    # in the order of the fields
    return TokenSums(n, squares, k3, distance, chi_square, *of_probs, *of_diff, *extremes, *of_classes, histogram)
