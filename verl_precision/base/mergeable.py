"""Statistics that merge: those of chunks, micro-batches and ranks give that of the whole, in any order.

The mean of the maxima of micro-batches is not the maximum, and the mean of their effective sample sizes is not the
effective sample size. So a statistic holds parts that merge without loss, and a formula that is applied once, after
the last merge. A new kind of statistic is a dataclass whose fields say how they merge:

    @dataclass(frozen=True)
    class Mean(Statistic):
        total: Tensor = added()
        number: Tensor = added()

        def value(self) -> float:
            return (self.total / self.number).item()
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.base.errors import ConfigurationError


def added() -> Any:
    """Declare a tensor that adds up."""
    return field(metadata={"merge": operator.add})


def smallest() -> Any:
    """Declare a tensor of which the smallest value survives."""
    return field(metadata={"merge": torch.minimum})


def largest() -> Any:
    """Declare a tensor of which the largest value survives."""
    return field(metadata={"merge": torch.maximum})


def joined() -> Any:
    """Declare a 1-D tensor of which all values are kept."""
    return field(metadata={"merge": lambda mine, theirs: torch.cat([mine, theirs])})


def same() -> Any:
    """Declare a setting, which must be equal in all that is merged."""
    return field(metadata={"merge": _equal})


def _equal(mine: Any, theirs: Any) -> Any:
    if mine != theirs:
        raise ConfigurationError(
            f"statistics with the settings {mine} and {theirs} cannot be merged",
            allowed="one setting",
            remedy="Give all micro-batches and ranks the same.",
        )
    return mine


@functools.cache
def _rules(kind: type) -> dict[str, Callable[[Any, Any], Any]]:
    return {part.name: part.metadata["merge"] for part in dataclasses.fields(kind)}


@dataclass(frozen=True)
class Statistic:
    """Base of all statistics: its fields are tensors on one device, or settings."""

    def merge(self, other: Self) -> Self:
        """Return the statistic of both pieces together.

        Raises:
            ConfigurationError: If the settings of the two differ.
        """
        rules = _rules(type(self))  # type: ignore[arg-type]
        return type(self)(*(rule(getattr(self, name), getattr(other, name)) for name, rule in rules.items()))

    def on_cpu(self) -> Self:
        """Return the statistic with its tensors as float64 on the CPU, without graph."""
        parts = [getattr(self, name) for name in _rules(type(self))]  # type: ignore[arg-type]
        return type(self)(*(part.detach().double().cpu() if isinstance(part, Tensor) else part for part in parts))

    def value(self) -> float:
        """Return the metric; NaN where it is undefined (the mean of nothing)."""
        raise NotImplementedError

    def values(self, name: str) -> dict[str, float]:
        """Return all metrics that this statistic gives, by name; most give one."""
        return {name: self.value()}


@dataclass(frozen=True)
class Count(Statistic):
    """Σ."""

    total: Tensor = added()

    def value(self) -> float:
        """Return the sum."""
        return float(self.total)


@dataclass(frozen=True)
class Mean(Statistic):
    """Σ total / Σ number, over pieces and over the elements of both."""

    total: Tensor = added()
    number: Tensor = added()

    def value(self) -> float:
        """Return the mean."""
        return (self.total.sum() / self.number.sum()).item()


@dataclass(frozen=True)
class Share(Mean):
    """A share of what lies within bounds, which are a setting."""

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
    """The smallest; infinity in a piece without values, which changes nothing."""

    extreme: Tensor = smallest()

    def value(self) -> float:
        """Return it."""
        return self.extreme.item() if math.isfinite(self.extreme) else math.nan


@dataclass(frozen=True)
class Maximum(Minimum):
    """The largest; minus infinity in a piece without values."""

    extreme: Tensor = largest()


class Mergeable(Protocol):
    """What can be merged with its like."""

    def merge(self, other: Self) -> Self:
        """Return both pieces together; neither changes."""


NameT = TypeVar("NameT")
MergeableT = TypeVar("MergeableT", bound=Mergeable)


def merge_by_name(pieces: Iterable[Mapping[NameT, MergeableT]]) -> dict[NameT, MergeableT]:
    """Merge the statistics, or sets of them, of pieces name by name; a piece need not have every name."""
    merged: dict[NameT, MergeableT] = {}
    for piece in pieces:
        for name, statistic in piece.items():
            merged[name] = merged[name].merge(statistic) if name in merged else statistic
    return merged


@dataclass(frozen=True)
class StatisticSet:
    """Statistics by name that are merged and reported together.

    Attributes:
        prefix: What the names of all metrics begin with.
        statistics: Name -> statistic.
    """

    prefix: ClassVar[str]
    statistics: Mapping[str, Statistic] = field(default_factory=dict)

    @classmethod
    def on_cpu(cls, statistics: Mapping[str, Statistic]) -> Self:
        """Return a set whose tensors are on the CPU."""
        return cls({name: statistic.on_cpu() for name, statistic in statistics.items()})

    def merge(self, other: Self) -> Self:
        """Return the statistics of both pieces together; neither changes.

        Raises:
            ConfigurationError: If settings of the two differ.
        """
        return type(self)(merge_by_name([self.statistics, other.statistics]))

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; those that are undefined on what was measured are left out."""
        values = [statistic.values(name) for name, statistic in self.statistics.items()]
        return {self.prefix + name: value for found in values for name, value in found.items() if math.isfinite(value)}
