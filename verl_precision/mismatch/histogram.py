"""A histogram of the gap on a fixed signed-log grid, and quantiles read off it.

The grid does not depend on the data, so histograms of pieces add up to that of the whole, and so do the quantiles.
From 2⁻³⁰ to 2¹² nats each octave of |g| has 16 bins of equal width, so a bin is at most 1/16 of its values wide; one
bin holds |g| < 2⁻³⁰ (9e-10), one each g beyond ±4096.

A bin is found from the bits of g as float32 (sign, exponent, first four bits of the mantissa): no search, no logarithm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_precision.base.mergeable import Statistic, added, largest, smallest

LOWEST, HIGHEST = -30, 12  # octaves, as powers of 2
PER_OCTAVE = 16
_BIAS = 127
# A float32's bits, as an integer, are shifted by these; `HALF` is then the number of bins of either sign.
BITS_LEFT, HALF = 19, 1 << 12
_LOW, _HIGH = (_BIAS + LOWEST) * PER_OCTAVE, (_BIAS + HIGHEST) * PER_OCTAVE
# Bins of each sign with bounded edges; between the signs lies the bin around 0.
PER_SIGN = _HIGH - _LOW

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
ABS_QUANTILES = {"abs_p50": 0.5, "abs_p90": 0.9, "abs_p99": 0.99, "abs_p999": 0.999}


@dataclass(frozen=True)
class GapHistogram(Statistic):
    """The number of gaps in each bin, as `gap_counts` returns it, and the smallest and largest of them."""

    counts: Tensor = added()
    low: Tensor = smallest()
    high: Tensor = largest()

    def values(self, name: str) -> dict[str, float]:
        """Return the quantiles of g, `<name>_p..`, and of |g|, `<name>_abs_p..`."""
        low, high = self.low.item(), self.high.item()
        edges, (abs_edges, abs_counts) = gap_edges(), absolute(self.counts)
        found = {label: quantile(edges, self.counts, q, low, high) for label, q in QUANTILES.items()}
        for label, q in ABS_QUANTILES.items():
            found[label] = quantile(abs_edges, abs_counts, q, 0.0, max(high, -low))
        return {f"{name}_{label}": value for label, value in found.items()}


def gap_counts(gap_N: Tensor) -> Tensor:
    """Return the number of gaps (finite) in each bin, float64, from the lowest g to the highest."""
    bits_N = (gap_N.float().view(torch.int32) >> BITS_LEFT).add_(HALF)  # the sign bit makes it negative
    return counts_of_bits(torch.bincount(bits_N, minlength=2 * HALF))


def counts_of_bits(tokens: Tensor) -> Tensor:
    """Return the same counts from how often each value of the shifted bits occurred: [2 HALF], negative gaps first."""
    negative, positive = tokens.split(HALF)
    ends = torch.stack([negative[_HIGH:].sum(), negative[:_LOW].sum() + positive[:_LOW].sum(), positive[_HIGH:].sum()])
    middle = negative[_LOW:_HIGH].flip(0), positive[_LOW:_HIGH]
    return torch.cat([ends[:1], middle[0], ends[1:2], middle[1], ends[2:]]).double()


def gap_edges() -> Tensor:
    """Return the edges of the bins in nats, float64, -inf to inf; one more than there are counts."""
    octaves = torch.arange(LOWEST, HIGHEST, dtype=torch.float64).exp2()
    steps = 1 + torch.arange(PER_OCTAVE, dtype=torch.float64) / PER_OCTAVE
    top = torch.tensor([2.0**HIGHEST, torch.inf], dtype=torch.float64)
    above = torch.cat([(octaves[:, None] * steps).flatten(), top])
    return torch.cat([-above.flip(0), above])


def absolute(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a histogram of g into one of |g|: (edges, counts); the first bin is [0, 2⁻³⁰)."""
    middle = PER_SIGN + 1
    folded = counts[middle:].clone()
    folded[1:] += counts[:middle].flip(0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), gap_edges()[middle + 1 :]]), folded


def quantile(edges: Tensor, counts: Tensor, q: float, low: float, high: float) -> float:
    """Return the q-quantile: the smallest x with F(x) ≥ q, F the distribution that is uniform within each bin.

    It lies in the bin that holds the ⌈q n⌉-th smallest value, so it is at most one bin off. Of the K + 1 `edges` the
    outer ones are bounded by `low` and `high`, the smallest and largest value counted.
    """
    cumulated = counts.cumsum(0)
    rank = q * cumulated[-1]
    k = int(torch.searchsorted(cumulated, rank))
    left, right = max(edges[k].item(), low), min(edges[k + 1].item(), high)
    inside = (rank - cumulated[k] + counts[k]) / counts[k]
    return min(max(left + (right - left) * inside.item(), low), high)
