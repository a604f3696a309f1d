"""Statistics that merge: chunks, micro-batches and ranks give the statistic of the whole batch, in any order.

The mean of the maxima of micro-batches is not the maximum, and the mean of their effective sample sizes is not the
effective sample size. So a statistic holds parts that merge without loss, and a formula that is applied once, after
the last merge. A new kind of statistic is a dataclass whose fields declare how they merge, as in `Mean` below.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError

# Below this variance (a standard deviation of 1e-6) numbers are constant up to rounding, and a correlation is noise.
SMALLEST_VARIANCE = 1e-12


def _equal(mine: Any, theirs: Any) -> Any:
    if mine != theirs:
        problem = f"statistics with the settings {mine} and {theirs} cannot be merged"
        raise ConfigurationError(problem, remedy="Use the same settings for all micro-batches and ranks.")
    return mine


def _merged_by(rule: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    return functools.partial(field, metadata={"merge": rule})


added = _merged_by(operator.add)  # a tensor whose values are added
smallest = _merged_by(torch.minimum)  # a tensor of which the smallest value is kept
largest = _merged_by(torch.maximum)  # a tensor of which the largest value is kept
joined = _merged_by(lambda mine, theirs: torch.cat([mine, theirs]))  # a 1-D tensor of which all values are kept
same = _merged_by(_equal)  # a setting, which must be equal in all merged statistics


@dataclass(frozen=True)
class Statistic:
    """Base of all statistics: its fields are tensors on one device, or settings."""

    def merge(self, other: Self) -> Self:
        """Return the statistic of both pieces together; settings that differ raise `ConfigurationError`."""
        pairs = ((part.metadata["merge"], part.name) for part in dataclasses.fields(self))
        return type(self)(*(rule(getattr(self, name), getattr(other, name)) for rule, name in pairs))

    def on_cpu(self) -> Self:
        """Return the statistic with its tensors as float64 on the CPU, without a graph."""
        parts = [getattr(self, part.name) for part in dataclasses.fields(self)]
        return type(self)(*(part.detach().double().cpu() if isinstance(part, Tensor) else part for part in parts))

    def value(self) -> float:
        """Return the metric; NaN if it is undefined (a mean without values)."""
        raise NotImplementedError

    def values(self, name: str) -> dict[str, float]:
        """Return all metrics of this statistic, by name; most statistics give one metric."""
        return {name: self.value()}


@dataclass(frozen=True)
class Count(Statistic):
    """The sum of all totals."""

    total: Tensor = added()

    def value(self) -> float:
        """Return the sum."""
        return float(self.total)


@dataclass(frozen=True)
class Mean(Statistic):
    """The mean Σ total / Σ number, over all pieces and all elements."""

    total: Tensor = added()
    number: Tensor = added()

    def value(self) -> float:
        """Return the mean."""
        return (self.total.sum() / self.number.sum()).item()


@dataclass(frozen=True)
class Share(Mean):
    """The share of values within bounds; the bounds are a setting."""

    bounds: tuple[float, ...] = same()


@dataclass(frozen=True)
class Deviation(Mean):
    """Population standard deviation, √(Σx²/n - (Σx/n)²)."""

    squares: Tensor = added()

    def value(self) -> float:
        """Return the deviation."""
        number, total, squares = (part.sum().item() for part in (self.number, self.total, self.squares))
        return math.sqrt(max(squares / number - (total / number) ** 2, 0.0)) if number else math.nan


@dataclass(frozen=True)
class Minimum(Statistic):
    """The smallest value; a piece without values holds infinity."""

    extreme: Tensor = smallest()

    def value(self) -> float:
        """Return the extreme value; NaN if it is not finite."""
        return self.extreme.item() if math.isfinite(self.extreme) else math.nan


@dataclass(frozen=True)
class Maximum(Minimum):
    """The largest value; a piece without values holds minus infinity."""

    extreme: Tensor = largest()


def spread(
    name: str, total: Tensor, number: Tensor, squares: Tensor, extremes: tuple[Tensor, Tensor]
) -> dict[str, Statistic]:
    """Return `<name>_std`, `<name>_min` and `<name>_max` of some values, from their sums and extremes."""
    kinds = {"std": Deviation(total, number, squares), "min": Minimum(extremes[0]), "max": Maximum(extremes[1])}
    return {f"{name}_{kind}": statistic for kind, statistic in kinds.items()}


@dataclass(frozen=True)
class Perplexity(Mean):
    """The perplexity: e to the power of the mean of -log p over tokens."""

    def value(self) -> float:
        """Return the perplexity. Above a mean of 709 nats it is infinite, and the metrics leave it out."""
        return (self.total / self.number).exp().item()


@dataclass(frozen=True)
class Correlation(Statistic):
    """Pearson's correlation of x and y, from sums of x and of d = y - x, so that a small d keeps its digits."""

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

    The sums are over e^(s - m) with m the largest s, so that no exponent is positive.
    """

    number: Tensor = added()
    largest: Tensor = largest()
    total: Tensor = added()
    squares: Tensor = added()

    def merge(self, other: Self) -> Self:
        """Return both statistics together: bring their sums to the larger maximum, then add them."""
        top = torch.maximum(self.largest, other.largest)
        mine, theirs = (math.exp(part.largest - top) for part in (self, other))
        total = self.total * mine + other.total * theirs
        squares = self.squares * mine**2 + other.squares * theirs**2
        return type(self)(self.number + other.number, top, total, squares)

    def values(self, name: str) -> dict[str, float]:
        """Return `<name>`, in responses, and `<name>_fraction`."""
        effective = (self.total**2 / self.squares).item()
        return {name: effective, f"{name}_fraction": effective / self.number.item()}


class Mergeable(Protocol):
    """An object that merges with others of its class."""

    def merge(self, other: Self) -> Self:
        """Return both pieces together; neither changes."""


NameT = TypeVar("NameT")
MergeableT = TypeVar("MergeableT", bound=Mergeable)


def merge_by_name(pieces: Iterable[Mapping[NameT, MergeableT]]) -> dict[NameT, MergeableT]:
    """Return the statistics (or sets of statistics) of all pieces, merged by name; a piece may lack a name."""
    merged: dict[NameT, MergeableT] = {}
    for piece in pieces:
        for name, statistic in piece.items():
            merged[name] = merged[name].merge(statistic) if name in merged else statistic
    return merged


@dataclass(frozen=True)
class StatisticSet:
    """Statistics by name that are merged and reported together."""

    prefix: ClassVar[str] = ""  # the names of all metrics begin with it
    statistics: Mapping[str, Statistic] = field(default_factory=dict)

    @classmethod
    def on_cpu(cls, statistics: Mapping[str, Statistic]) -> Self:
        """Return a set whose tensors are on the CPU."""
        return cls({name: statistic.on_cpu() for name, statistic in statistics.items()})

    def merge(self, other: Self) -> Self:
        """Return the statistics of both pieces together; neither changes, and their settings must be equal."""
        return type(self)(merge_by_name([self.statistics, other.statistics]))

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, without undefined ones."""
        values = [statistic.values(name) for name, statistic in self.statistics.items()]
        return {self.prefix + name: value for found in values for name, value in found.items() if math.isfinite(value)}
