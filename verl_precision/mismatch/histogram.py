"""A histogram of the gap on a fixed signed-log grid, and quantiles read off it.

The grid does not depend on the data, so histograms of pieces add up to that of the whole, and so do the quantiles.
From 2⁻³⁰ to 2¹² nats each octave of |g| has 16 bins of equal width, so a bin is at most 1/16 of its values wide; one
bin holds |g| < 2⁻³⁰ (9e-10), one each g beyond ±4096.

A bin is found from the bits of g as float32 (sign, exponent, first four bits of the mantissa): no search, no logarithm.
"""

import torch
from torch import Tensor

LOWEST, HIGHEST = -30, 12  # octaves, as powers of 2
PER_OCTAVE = 16
_BIAS, _MANTISSA_BITS_LEFT, _HALF = 127, 19, 1 << 12
_LOW, _HIGH = (_BIAS + LOWEST) * PER_OCTAVE, (_BIAS + HIGHEST) * PER_OCTAVE
PER_SIGN = _HIGH - _LOW
BINS = 2 * PER_SIGN + 3


def bit_counts(gap_N: Tensor) -> Tensor:
    """Return [8192] int64: how many g have each pattern of leading bits, as float32; negative g first.

    Args:
        gap_N: [N] floating, finite.
    """
    keys_N = (gap_N.float().view(torch.int32) >> _MANTISSA_BITS_LEFT).add_(_HALF)  # the sign bit makes it negative
    return torch.bincount(keys_N, minlength=2 * _HALF)


def gap_counts(bit_counts: Tensor) -> Tensor:
    """Return [BINS] float64: `bit_counts` folded to the grid, from the lowest g to the highest."""
    negative, positive = bit_counts.split(_HALF)
    ends = torch.stack([negative[_HIGH:].sum(), negative[:_LOW].sum() + positive[:_LOW].sum(), positive[_HIGH:].sum()])
    middle = negative[_LOW:_HIGH].flip(0), positive[_LOW:_HIGH]
    return torch.cat([ends[:1], middle[0], ends[1:2], middle[1], ends[2:]]).double()


def gap_edges() -> Tensor:
    """Return [BINS + 1] float64, -inf to inf, the edges of the bins in nats."""
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

    It lies in the bin that holds the ⌈q n⌉-th smallest value, so it is at most one bin off.

    Args:
        edges: [K + 1] ascending.
        counts: [K], not all zero.
        q: in (0, 1).
        low: smallest value counted; with `high`, bounds the outer bins.
        high: largest value counted.
    """
    cumulated = counts.cumsum(0)
    rank = q * cumulated[-1]
    k = int(torch.searchsorted(cumulated, rank))
    left, right = max(edges[k].item(), low), min(edges[k + 1].item(), high)
    inside = (rank - cumulated[k] + counts[k]) / counts[k]
    return min(max(left + (right - left) * inside.item(), low), high)
