"""What the metrics of tokens are made of: sums over tokens, which merge, and torch's way to them.

`fused_kernel.py` fills the same sums in one pass. A new sum is a field here, an entry at its place in `sums_of`, and a
line in `fused_kernel._sum`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_precision.base.mergeable import Statistic, added, largest, smallest
from verl_precision.mismatch.histogram import gap_counts
from verl_precision.mismatch.token_bins import class_totals, token_classes

# Guard: in k3 and in total variation a gap above 600 nats counts as 600. e^600 = 4e260 can still be summed over 1e40
# tokens in float64. `log_prob_gap_max` shows such a gap as it is.
LARGEST_GAP = 600.0
# The same for chi-square, which squares the ratio.
LARGEST_GAP_SQUARED = LARGEST_GAP / 2


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
    gap_min: Tensor = smallest()  # the smallest g
    diff_min: Tensor = smallest()  # the smallest π - μ
    gap_max: Tensor = largest()  # the largest g
    diff_max: Tensor = largest()  # the largest π - μ
    tokens_C: Tensor = added()  # [CLASSES], the number of tokens of each class (`token_bins.py`)
    gap_C: Tensor = added()  # [CLASSES], their g
    gap_abs_C: Tensor = added()  # [CLASSES], their abs(g)
    histogram: Tensor = added()  # the number of gaps in each bin (`histogram.py`)


def sums_of(pi_N: Tensor, mu_N: Tensor, gap_N: Tensor, advantages_N: Tensor) -> TokenSums:
    """Return the sums of one chunk's tokens, at least one, from log π, log μ (float64), and their difference.

    Only the sign of advantages matters. Arrays are used again and few live at once, for speed.
    """
    of_classes = class_totals(token_classes(mu_N, advantages_N), gap_N)
    histogram, squares, (gap_min, gap_max) = gap_counts(gap_N), gap_N.dot(gap_N), gap_N.aminmax()
    capped_N = gap_N if gap_max <= LARGEST_GAP else gap_N.clamp(max=LARGEST_GAP)
    excess_N = capped_N.expm1()  # e^g - 1; taking 1 from e^g would lose the digits of a small g
    excess, distance = excess_N.sum(), excess_N.abs().sum()
    squared_N = excess_N if gap_max <= LARGEST_GAP_SQUARED else gap_N.clamp(max=LARGEST_GAP_SQUARED).expm1()
    probs_N = mu_N.exp()
    chi_square = squared_N.dot(squared_N) + 2 * squared_N.sum()  # e^2g - 1 = (e^g - 1)² + 2 (e^g - 1)
    if gap_max <= LARGEST_GAP:
        diff_N = excess_N.mul_(probs_N)  # π - μ = μ (e^g - 1)
    else:
        diff_N = torch.exp(pi_N, out=excess_N).sub_(probs_N)
    diff_min, diff_max = diff_N.aminmax()
    n, k3 = gap_N.new_full((), len(gap_N)), excess - capped_N.sum()
    of_probs = mu_N.sum(), probs_N.sum(), probs_N.dot(probs_N)
    of_diff = diff_N.sum(), diff_N.abs().sum(), diff_N.dot(diff_N), probs_N.dot(diff_N), (gap_N == 0).sum().double()
    extremes = gap_min, diff_min, gap_max, diff_max
    # in the order of the fields
    return TokenSums(n, squares, k3, distance, chi_square, *of_probs, *of_diff, *extremes, *of_classes, histogram)
