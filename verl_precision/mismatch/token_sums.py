"""Sums over tokens and over responses, from which the mismatch metrics are made."""

import math

import torch
from torch import Tensor

# Guard: in k3 and in total variation a gap above 600 nats counts as 600. e^600 = 4e260 can still be summed over 1e40
# tokens in float64. `log_prob_gap_max` shows such a gap as it is.
LARGEST_GAP = 600.0


def token_sums(pi_N: Tensor, mu_N: Tensor, gap_N: Tensor) -> dict[str, Tensor]:
    """Return fields of `MismatchSums` for the tokens of a chunk, [] float64 each.

    Args:
        pi_N: [N] float64, log π(yₜ); N >= 1.
        mu_N: [N] float64, log μ(yₜ).
        gap_N: [N] float64, their difference.
    """
    gap_min, gap_max = gap_N.aminmax()
    capped_N = gap_N.clamp(max=LARGEST_GAP)
    excess_N = capped_N.expm1()  # e^g - 1; taking 1 from e^g would lose the digits of a small g
    sums = {
        "gap_squares": gap_N.dot(gap_N),
        "gap_min": gap_min,
        "gap_max": gap_max,
        "ratio_distance": excess_N.abs().sum(),
        "k3": excess_N.sum() - capped_N.sum(),
    }
    probs_N = torch.exp(mu_N, out=capped_N)
    if gap_max <= LARGEST_GAP:
        diff_N = excess_N.mul_(probs_N)  # π - μ = μ (e^g - 1)
    else:
        diff_N = torch.exp(pi_N, out=excess_N).sub_(probs_N)
    diff_min, diff_max = diff_N.aminmax()
    return sums | {
        "probs": probs_N.sum(),
        "probs_squares": probs_N.dot(probs_N),
        "probs_cross": probs_N.dot(diff_N),
        "probs_diff": diff_N.sum(),
        "probs_diff_abs": diff_N.abs().sum(),
        "probs_diff_squares": diff_N.dot(diff_N),
        "probs_diff_min": diff_min,
        "probs_diff_max": diff_max,
    }


def sequence_sums(s_B: Tensor, length_B: Tensor, ratio_threshold: float) -> dict[str, float]:
    """Return fields of `MismatchSums` for whole responses; nothing if there are none.

    Args:
        s_B: [B] float64, log ρ of each response.
        length_B: [B] float64, its tokens.
        ratio_threshold: C.
    """
    if not len(s_B):
        return {}
    abs_B, largest_s, bound = s_B.abs(), s_B.max(), math.log(ratio_threshold)
    ratios_B = (s_B - largest_s).exp()
    sums = {
        "sequence_sum": s_B.sum(),
        "sequence_abs": abs_B.sum(),
        "sequence_squares": s_B.dot(s_B),
        "sequence_min": s_B.min(),
        "sequence_max": largest_s,
        "length_sum": length_B.sum(),
        "length_squares": length_B.dot(length_B),
        "length_cross": length_B.dot(abs_B),
        "at_most_c": (s_B <= bound).sum(),
        "within_c": (abs_B <= bound).sum(),
        "ratio_sum": ratios_B.sum(),
        "ratio_squares": ratios_B.dot(ratios_B),
    }
    return {"responses": float(len(s_B)), **{name: float(value) for name, value in sums.items()}}
