"""Classes of tokens: by the probability the rollout gave them, and by the sign of their advantage.

The precision gap is up to 50 times larger on tokens of low probability, and it correlates with the advantage (source:
docs/metrics.md), so both are kept apart.
"""

import math

import torch
from torch import Tensor

# Decades of μ(yₜ): likely tokens first. A token exactly on an edge is on either side, as float64 rounds its logarithm.
PROBABILITY_BINS = ("prob_1e-1_1", "prob_1e-2_1e-1", "prob_1e-3_1e-2", "prob_1e-4_1e-3", "prob_0_1e-4")
CLASSES = 3 * len(PROBABILITY_BINS)
NEGATIVE, POSITIVE = 0, 2


def token_classes(rollout_log_probs_N: Tensor, advantages_N: Tensor | None) -> Tensor:
    """Return [N] int32, 3 x bin + sign; sign is 0 where A < 0, 2 where A > 0, else 1 (A = 0, NaN or not given)."""
    bins_N = (rollout_log_probs_N * (-1 / math.log(10))).clamp_(max=len(PROBABILITY_BINS) - 1)
    classes_N = bins_N.to(torch.int32).mul_(3).add_(1)
    if advantages_N is not None:
        classes_N += advantages_N.sign().to(torch.int32)  # of NaN it is 0
    return classes_N


def class_sums(classes_N: Tensor, values_N: Tensor) -> Tensor:
    """Return [CLASSES]: the sum of the values of each class."""
    return torch.bincount(classes_N, weights=values_N, minlength=CLASSES)


def class_totals(classes_N: Tensor, values_N: Tensor) -> dict[str, Tensor]:
    """Return `tokens`, `sum` and `abs` of each class, [CLASSES]: how many values, their sum, the sum of |value|.

    Negative values are summed apart, so that one pass gives both sums.
    """
    signed_N = classes_N.add(values_N.signbit(), alpha=CLASSES)
    counts = torch.bincount(signed_N, minlength=2 * CLASSES).view(2, CLASSES)
    positive, negative = torch.bincount(signed_N, weights=values_N, minlength=2 * CLASSES).view(2, CLASSES)
    return {"tokens": counts.sum(dim=0), "sum": positive + negative, "abs": positive - negative}


def by_bin(sums: Tensor) -> dict[str, float]:
    """Return probability bin -> sum over signs."""
    return dict(zip(PROBABILITY_BINS, sums.view(-1, 3).sum(dim=1).tolist(), strict=True))


def by_sign(sums: Tensor) -> dict[str, float]:
    """Return "positive_advantage" and "negative_advantage" -> sum over bins."""
    signs = sums.view(-1, 3).sum(dim=0).tolist()
    return {"positive_advantage": signs[POSITIVE], "negative_advantage": signs[NEGATIVE]}
