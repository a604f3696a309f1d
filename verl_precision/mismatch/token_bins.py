"""Tokens by the probability that the rollout gave them, and by the sign of their advantage: together, their class.

The precision gap is up to 50 times larger on tokens of low probability, and it correlates with the advantage (source:
docs/metrics.md), so both are kept apart.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_precision.base.mergeable import Mean, Statistic, added, same

# Decades of μ(yₜ): likely tokens first. A token exactly on an edge is on either side, as float64 rounds its logarithm.
PROBABILITY_BINS = ("prob_1e-1_1", "prob_1e-2_1e-1", "prob_1e-3_1e-2", "prob_1e-4_1e-3", "prob_0_1e-4")
SIGN_COUNT = 3  # negative, none, positive
CLASSES = len(PROBABILITY_BINS) * SIGN_COUNT
NATS_TO_DECADES, LAST_BIN = -1 / math.log(10), len(PROBABILITY_BINS) - 1


def token_classes(rollout_log_probs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return [N] int32, 3 x bin + sign; an advantage of 0 or NaN has no sign."""
    bins_N = (rollout_log_probs_N * NATS_TO_DECADES).clamp_(max=LAST_BIN)
    return bins_N.to(torch.int32).mul_(SIGN_COUNT).add_(1).add_(advantages_N.sign().to(torch.int32))  # of NaN it is 0


def class_totals(classes_N: Tensor, values_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [CLASSES] float64 each: the number of values of each class, their sum, and the sum of |value|.

    Negative values are summed apart, so that one pass gives both sums.
    """
    signed_N = classes_N.add(values_N.signbit(), alpha=CLASSES)
    counts = torch.bincount(signed_N, minlength=2 * CLASSES)
    return totals_of_signed(counts, torch.bincount(signed_N, weights=values_N, minlength=2 * CLASSES))


def totals_of_signed(counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same from numbers and sums, [2 CLASSES] each: of values without a sign, then of negative ones."""
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
    """The share of the tokens that each bin has."""

    tokens: Tensor = added()

    def values(self, name: str) -> dict[str, float]:
        """Return `<bin>/<name>` of all bins."""
        return _by_bin(name, (self.tokens.view(-1, SIGN_COUNT).sum(dim=1) / self.tokens.sum()).tolist())


def _by_bin(name: str, values: list[float]) -> dict[str, float]:
    return {f"{bin_name}/{name}": value for bin_name, value in zip(PROBABILITY_BINS, values, strict=True)}
