"""All sums over tokens in one pass over the batch, compiled by numba; `fused.py` decides when it is used.

Importing this module imports numba; the first call compiles. The loops over tokens hold no branch and write nothing, so
that they become vector instructions. Arithmetic is IEEE float64 as written, with two freedoms: sums may be taken in any
order (`_plus...`), and a product and a sum may share one rounding (`_product_plus`).
"""

import math
from typing import Any

import numpy as np
from numba import float64, njit
from numba.extending import intrinsic

# numba's cache checks only the date of this file: touch the file after a change of an imported constant.
from verl_precision.mismatch.token_sums import (
    BITS_LEFT,
    CLASSES,
    HALF,
    LARGEST_GAP,
    LARGEST_GAP_SQUARED,
    LAST_BIN,
    NATS_TO_DECADES,
    SIGN_COUNT,
)  # fmt: skip

BLOCK = 1024  # tokens that stay in the nearest cache while they are read four times
ADDED = 13  # sums that only add up, the first fields of `TokenSums`

# e^x = 2ⁿ e^r with n = round(x / ln 2) and |r| ≤ ln 2 / 2. Adding 1.5 · 2^52 rounds to an integer, which is then in the
# lowest bits. ln 2 is split in two, so that n times the first part is exact.
ROUNDER, ROUNDER_EXPONENT = 1.5 * 2.0**52, 1023
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Taylor's series of (e^r - 1 - r) / r²; the first term left out is below 1e-17 of it.
SERIES = tuple(1 / math.factorial(k) for k in range(2, 15))
LOWEST_EXPONENT = -708.0  # e^x is an ordinary number down to here; below, it counts as 0
LARGEST_EXCESS = math.expm1(LARGEST_GAP_SQUARED)


@njit(fastmath={"reassoc", "nsz"})
def _plus(total, value):
    return total + value


@njit(fastmath={"reassoc", "nsz", "contract"})
def _plus_product(total, one, other):
    return total + one * other


@njit(fastmath={"contract"})
def _product_plus(one, other, summand):
    return one * other + summand


@njit
def _pair(k, r):
    return _product_plus(SERIES[k + 1], r, SERIES[k])


def _extreme(sign: str) -> Any:
    """Return min or max of two numbers that are not NaN, in a form that can become a vector instruction."""
    flags = ("nnan", "nsz")

    def of_two(typing_context: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.select(builder.fcmp_ordered(sign, *arguments, flags=flags), *arguments, flags=flags)

        return float64(float64, float64), generate

    return intrinsic(of_two)


_least, _most = _extreme("<"), _extreme(">")


@njit(error_model="numpy")
def exponential(x):
    """Return 2ⁿ, e^r - 1 - r and r for an x in [-708, 709]; e^x = 2ⁿ e^r."""
    shifted = _product_plus(x, 1 / math.log(2), ROUNDER)
    n = shifted - ROUNDER
    power = np.int64((np.float64(shifted).view(np.int64) + ROUNDER_EXPONENT) << 52).view(np.float64)
    r = _product_plus(n, -LN2_LOW, _product_plus(n, -LN2_HIGH, x))
    # Pairs of terms, and pairs of pairs, so that a vector instruction waits for few others (Estrin's scheme).
    r2 = r * r
    r4 = r2 * r2
    low = _product_plus(_pair(2, r), r2, _pair(0, r))
    middle = _product_plus(_pair(6, r), r2, _pair(4, r))
    high = _product_plus(r4, SERIES[12], _product_plus(_pair(10, r), r2, _pair(8, r)))
    series = _product_plus(_product_plus(high, r4, middle), r4, low)
    return power, series * r2, r


@njit(error_model="numpy")
def _sum(pi, mu, added, lows, highs):
    """Add some tokens to the sums in the order of `TokenSums` (all but the first); return the sum of their gaps."""
    gaps = squares = k3 = distance = chi_square = mus = probs = 0.0
    probs_squares = diffs = diff_abs = diff_squares = cross = equal = 0.0
    gap_min, gap_max, diff_min, diff_max = lows[0], highs[0], lows[1], highs[1]
    for i in range(len(pi)):  # a loop of its own: the sums of both do not fit the registers
        log_mu = np.float64(mu[i])
        gap = np.float64(pi[i]) - log_mu
        gaps, squares, mus = _plus(gaps, gap), _plus_product(squares, gap, gap), _plus(mus, log_mu)
        equal = _plus(equal, 1.0 if gap == 0 else 0.0)
        gap_min, gap_max = _least(gap_min, gap), _most(gap_max, gap)
    for i in range(len(pi)):
        log_pi, log_mu = np.float64(pi[i]), np.float64(mu[i])
        gap = log_pi - log_mu
        capped = min(gap, LARGEST_GAP)
        power, rest, r = exponential(max(capped, LOWEST_EXPONENT))
        excess = _product_plus(power, r + rest, power - 1)  # e^g - 1
        far = (gap > LARGEST_GAP) | (log_mu < LOWEST_EXPONENT)  # μ counts as 0, so that π - μ = π
        log_prob = log_pi if far else log_mu
        power_of_prob, rest_of_prob, r = exponential(max(log_prob, LOWEST_EXPONENT))
        prob = power_of_prob * (1 + (r + rest_of_prob)) if log_prob >= LOWEST_EXPONENT else 0.0
        diff = prob if far else prob * excess  # π - μ = μ (e^g - 1)
        prob = 0.0 if far else prob
        squared = min(excess, LARGEST_EXCESS)
        k3 = _plus(k3, rest if power == 1 else excess - capped)
        distance, chi_square = _plus(distance, abs(excess)), _plus_product(chi_square, squared, squared + 2)
        probs, probs_squares = _plus(probs, prob), _plus_product(probs_squares, prob, prob)
        cross, diff_squares = _plus_product(cross, prob, diff), _plus_product(diff_squares, diff, diff)
        diffs, diff_abs = _plus(diffs, diff), _plus(diff_abs, abs(diff))
        diff_min, diff_max = _least(diff_min, diff), _most(diff_max, diff)
    totals = squares, k3, distance, chi_square, mus, probs, probs_squares, diffs, diff_abs, diff_squares, cross, equal
    for k in range(len(totals)):
        added[1 + k] += totals[k]
    lows[0], highs[0], lows[1], highs[1] = gap_min, gap_max, diff_min, diff_max
    return gaps


@njit(error_model="numpy")
def _sort(pi, mu, signs, tokens, gaps, bits):
    """Count some tokens by class and by bin of the histogram; negative gaps have classes of their own."""
    for i in range(len(pi)):
        log_mu = np.float64(mu[i])
        gap = np.float64(pi[i]) - log_mu
        sign = np.int64(signs[i] > 0) - np.int64(signs[i] < 0)
        where = np.int64(min(log_mu * NATS_TO_DECADES, LAST_BIN)) * SIGN_COUNT + 1 + sign + (CLASSES if gap < 0 else 0)
        tokens[where] += 1
        gaps[where] += gap
        bits[(np.float32(gap).view(np.int32) >> BITS_LEFT) + HALF] += 1


@njit(error_model="numpy")
def _usable(pi, mu):
    """Return how many tokens have two log-probs that are finite and not above 0; NaN fails every comparison."""
    number = 0
    for i in range(len(pi)):
        number += (pi[i] <= 0) & (pi[i] > -np.inf) & (mu[i] <= 0) & (mu[i] > -np.inf)
    return number


@njit(error_model="numpy")
def _valid(mask):
    number = 0
    for i in range(len(mask)):
        number += mask[i] != 0
    return number


@njit(nogil=True, error_model="numpy", cache=True)
def measure_responses(pi, mu, mask, signs, begins, lengths):
    """Return sums over the tokens of some responses.

    Log π, log μ (float32 or float64), mask and advantages (`signs`) are flat arrays. `begins` [B] int64 is where each
    response begins in them, `lengths` [B] int64 is its length.

    The result has the 13 sums in the order of `TokenSums`; [2 CLASSES] tokens of each class, with a class apart for
    negative gaps, and their gaps; the [2 HALF] counts of the histogram; [2] tokens that are not finite, and tokens
    above 0; [2] each, the smallest and the largest gap and difference, infinite without tokens; and [3, B], the sum of
    each response's gaps, its number of tokens (-1 if it is not whole), and the gap of its last token.
    """
    added, lows, highs = np.zeros(ADDED), np.full(2, np.inf), np.full(2, -np.inf)
    tokens, gaps = np.zeros(2 * CLASSES, np.int64), np.zeros(2 * CLASSES)
    bits, left_out = np.zeros(2 * HALF, np.int64), np.zeros(2, np.int64)
    per_response = np.zeros((3, len(lengths)))
    log_ratio_B, length_B, final_gap_B = per_response
    kept_pi, kept_mu, kept_signs = np.empty(BLOCK, pi.dtype), np.empty(BLOCK, mu.dtype), np.empty(BLOCK, signs.dtype)
    for b in range(len(lengths)):
        unusable = 0
        for first in range(0, lengths[b], BLOCK):
            size = min(BLOCK, lengths[b] - first)
            begin = begins[b] + first
            end = begin + size
            block_pi, block_mu = pi[begin:end], mu[begin:end]
            block_mask, block_signs = mask[begin:end], signs[begin:end]
            valid = _valid(block_mask)
            if valid == 0:
                continue
            if valid < size or _usable(block_pi, block_mu) < size:
                n = 0
                for i in range(size):
                    x, y = block_pi[i], block_mu[i]
                    if block_mask[i] == 0:
                        continue
                    if not (np.isfinite(x) and np.isfinite(y)):
                        left_out[0] += 1
                    elif x > 0 or y > 0:
                        left_out[1] += 1
                    else:
                        kept_pi[n], kept_mu[n], kept_signs[n] = x, y, block_signs[i]
                        n += 1
                unusable += valid - n
                block_pi, block_mu, block_signs = kept_pi[:n], kept_mu[:n], kept_signs[:n]
            added[0] += len(block_pi)
            if len(block_pi):
                final_gap_B[b] = np.float64(block_pi[-1]) - np.float64(block_mu[-1])
            length_B[b] += len(block_pi)
            log_ratio_B[b] += _sum(block_pi, block_mu, added, lows, highs)
            _sort(block_pi, block_mu, block_signs, tokens, gaps, bits)
        if unusable or length_B[b] == 0:
            length_B[b] = -1
    return added, tokens, gaps, bits, left_out, lows, highs, per_response
