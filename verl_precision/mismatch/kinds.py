"""Kinds of statistics that only the mismatch has; the plain ones are in `verl_precision.base.mergeable`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.base.mergeable import Mean, Statistic, added, largest, same

# Below this variance (a standard deviation of 1e-6) probabilities are constant up to rounding, and a correlation noise.
SMALLEST_VARIANCE = 1e-12


@dataclass(frozen=True)
class Perplexity(Mean):
    """e to the mean of -log p over tokens."""

    def value(self) -> float:
        """Return the perplexity; infinite, and so left out of the metrics, where the mean is above 709 nats."""
        return (self.total / self.number).exp().item()


@dataclass(frozen=True)
class Correlation(Statistic):
    """Pearson's, of x and y; sums of x and of d = y - x keep the digits of a small d: var y = var x + 2 cov + var d."""

    number: Tensor = added()
    x: Tensor = added()
    x_squares: Tensor = added()
    d: Tensor = added()
    d_squares: Tensor = added()
    x_times_d: Tensor = added()

    def value(self) -> float:
        """Return the correlation; NaN where x or y is constant."""
        n = self.number.item()
        x, d = self.x.item() / n, self.d.item() / n
        var_x, var_d = self.x_squares.item() / n - x**2, self.d_squares.item() / n - d**2
        covariance = self.x_times_d.item() / n - x * d
        var_y = var_x + 2 * covariance + var_d
        if min(var_x, var_y) <= SMALLEST_VARIANCE:
            return math.nan
        return max(-1.0, min(1.0, (var_x + covariance) / math.sqrt(var_x * var_y)))


@dataclass(frozen=True)
class Slope(Statistic):
    """The least-squares slope of y on x, per `unit` of x."""

    unit: float = same()
    number: Tensor = added()
    x: Tensor = added()
    x_squares: Tensor = added()
    y: Tensor = added()
    x_times_y: Tensor = added()

    def value(self) -> float:
        """Return the slope; not finite where all x are equal."""
        variation = self.number * self.x_squares - self.x**2
        return (self.unit * (self.number * self.x_times_y - self.x * self.y) / variation).item()


@dataclass(frozen=True)
class RatioSampleSize(Statistic):
    """The effective sample size of ratios ρ = e^s, (Σρ)² / Σρ², and its share of the responses.

    Sums are of e^(s - m), m the largest s, so that no exponent is positive.
    """

    number: Tensor = added()
    largest: Tensor = largest()
    total: Tensor = added()
    squares: Tensor = added()

    def merge(self, other: Self) -> Self:
        """Bring the sums of both to the larger of the two maxima, then add."""
        top = torch.maximum(self.largest, other.largest)
        mine, theirs = (math.exp(part.largest - top) for part in (self, other))
        total = self.total * mine + other.total * theirs
        squares = self.squares * mine**2 + other.squares * theirs**2
        return type(self)(self.number + other.number, top, total, squares)

    def values(self, name: str) -> dict[str, float]:
        """Return `<name>`, in responses, and `<name>_fraction`."""
        effective = (self.total**2 / self.squares).item()
        return {name: effective, f"{name}_fraction": effective / self.number.item()}
