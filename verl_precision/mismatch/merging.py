"""State that is merged, not averaged: over chunks, micro-batches and ranks the result is that of the whole."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.errors import ConfigurationError

# What becomes of two values of a field.
_RULES: dict[str, Callable[[Any, Any], Any]] = {"add": operator.add, "min": min, "max": max, "same": lambda a, b: a}


def added(size: int = 1) -> Any:
    """Declare a field that adds up: a float, or a [size] float64 tensor."""
    if size == 1:
        return dataclasses.field(default=0.0, metadata={"merge": "add", "size": 1})
    make = lambda: torch.zeros(size, dtype=torch.float64)  # noqa: E731
    return dataclasses.field(default_factory=make, metadata={"merge": "add", "size": size})


def smallest() -> Any:
    """Declare a float of which the smallest survives."""
    return dataclasses.field(default=math.inf, metadata={"merge": "min", "size": 1})


def largest() -> Any:
    """Declare a float of which the largest survives."""
    return dataclasses.field(default=-math.inf, metadata={"merge": "max", "size": 1})


def setting(default: float) -> Any:
    """Declare a float that must be the same in all that is merged."""
    return dataclasses.field(default=default, metadata={"merge": "same", "size": 1})


@dataclasses.dataclass
class Sums:
    """A set of sums, minima and maxima, each a float or a float64 tensor on the CPU."""

    def merge(self, other: Self) -> Self:
        """Return the state of both batches together; neither argument changes.

        Raises:
            ConfigurationError: if the settings of the two differ.
        """
        merged = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            rule = field.metadata["merge"]
            if rule == "same" and mine != theirs:
                raise ConfigurationError(
                    f"it is merged with {field.name}={theirs:g}",
                    setting=field.name,
                    value=mine,
                    allowed="one value",
                    remedy="Give all micro-batches and ranks the same.",
                )
            merged[field.name] = _RULES[rule](mine, theirs)
        return type(self)(**merged)

    def to_tensor(self) -> Tensor:
        """Return the state as one flat float64 tensor on the CPU, for `all_gather` or a micro-batch's output."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return torch.cat([torch.as_tensor(part, dtype=torch.float64).reshape(-1) for part in parts])

    @classmethod
    def from_tensor(cls, state: Tensor) -> Self:
        """Return the state that `to_tensor` flattened.

        Raises:
            ConfigurationError: if the tensor has another length or type.
        """
        fields = dataclasses.fields(cls)
        sizes = [field.metadata["size"] for field in fields]
        if state.shape != (sum(sizes),) or state.dtype != torch.float64:
            raise ConfigurationError(
                f"state is {state.dtype} of shape {tuple(state.shape)}",
                allowed=f"float64 ({sum(sizes)},), made by {cls.__name__}.to_tensor() of this version",
                remedy="Pass that.",
            )
        parts = state.cpu().split(sizes)
        values = [part.clone() if size > 1 else part.item() for part, size in zip(parts, sizes, strict=True)]
        return cls(**{field.name: value for field, value in zip(fields, values, strict=True)})


State = TypeVar("State", bound=Sums)


class PartialSums:
    """The fields of some `Sums` over chunks, kept on the chunks' device until the last one."""

    def __init__(self, kind: type[Sums]):
        self._rules = {field.name: field.metadata["merge"] for field in dataclasses.fields(kind)}
        self._scalars: list[Tensor] = []
        self._names: list[str] = []
        self._vectors: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        """Add one chunk: a 0-D float64 tensor for a float, a 1-D tensor for a field that adds up."""
        self._names = [name for name, value in values.items() if value.dim() == 0]
        self._scalars.append(torch.stack([values[name] for name in self._names]))
        for name, value in values.items():
            if value.dim():
                self._vectors[name] = self._vectors[name].add_(value) if name in self._vectors else value

    def result(self) -> dict[str, Any]:
        """Return field -> float, or tensor on the CPU, of all chunks; nothing if there were none."""
        if not self._scalars:
            return {}
        scalars = torch.stack(self._scalars).cpu()
        columns = scalars.t().tolist()
        merged = {
            name: functools.reduce(_RULES[self._rules[name]], column)
            for name, column in zip(self._names, columns, strict=True)
        }
        return merged | {name: value.cpu().double() for name, value in self._vectors.items()}


def finite(metrics: dict[str, float | None]) -> dict[str, float]:
    """Drop what is undefined (None) or beyond float64."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def ratio(numerator: float, denominator: float) -> float | None:
    """Return numerator / denominator, or None (undefined) over 0."""
    return numerator / denominator if denominator else None


def spread(total: float, squares: float, count: float) -> float | None:
    """Return the population standard deviation √(Σx²/n - (Σx/n)²), or None without values."""
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else None
