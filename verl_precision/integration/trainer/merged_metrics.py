"""Merges statistics inside verl, which would average everything that is reported.

`ppo_loss` forces MEAN on everything a policy loss returns, and the reduction over ranks is a class method of `Metric`
that no subclass can change. Both are wrapped: micro-batches, ranks and mini-batches of a `MergedMetric` are merged
before a number is computed. `run_monitor.py` takes statistics instead of numbers (`statistics_kept`).
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import reduce
from typing import Any

from verl.utils.metric import AggregationType, Metric

from verl_precision.base.mergeable import Mergeable, Statistic
from verl_precision.integration.ledger import set_within, wrap_once

_kept: ContextVar[bool] = ContextVar("kept", default=False)


def statistics_kept() -> AbstractContextManager[None]:
    """Return a context in which verl's reduction returns statistics, which can be merged with other updates'."""
    return set_within(_kept, True)


class MergedMetric(Metric):
    """The reports of micro-batches under one key; they are merged before anything is computed from them.

    A `Statistic`, of a loss, becomes a number in the driver, once the mini-batches of an update are merged. A set of
    statistics, of the mismatch, stays a set until the driver takes it and computes many metrics from it.
    """

    def __init__(self, pieces: Iterable[Mergeable] = ()) -> None:
        super().__init__(AggregationType.MEAN)  # verl compares the type of metrics that it joins
        self.values: list[Mergeable] = list(pieces)

    def append(self, value: "Mergeable | MergedMetric") -> None:
        """Add the report of one micro-batch, or those of another metric."""
        self.values.extend(value.values if isinstance(value, MergedMetric) else [value])

    def aggregate(self) -> float | Mergeable:
        """Return the number, or the set, of everything added so far."""
        merged = self.merged().values[0]
        return merged.value() if isinstance(merged, Statistic) and not _kept.get() else merged

    def merged(self) -> "MergedMetric":
        """Return the metric of everything added so far, in one piece."""
        whole: Any = reduce(lambda one, other: one.merge(other), self.values)  # type: ignore[arg-type, return-value]
        return MergedMetric([whole])

    def init_list(self) -> "MergedMetric":
        """Return an empty metric of this type."""
        return MergedMetric()


def metrics_of_loss(statistics: Mapping[str, Statistic]) -> dict[str, MergedMetric]:
    """Return a loss's statistics as metrics for verl, on the CPU, because they are sent between processes."""
    return {name: MergedMetric([piece.on_cpu()]) for name, piece in statistics.items()}


def keep_merged_metrics() -> None:
    """Wrap `Metric.from_dict` and `Metric.aggregate_dp`, once."""
    wrap_once("verl.utils.metric.utils", "Metric.from_dict", _from_dict)
    wrap_once("verl.utils.metric.utils", "Metric.aggregate_dp", _aggregate_dp)


def _from_dict(wrapped, instance, args, kwargs):
    data = kwargs.get("data", args[0] if args else {})
    ours = {key: value for key, value in data.items() if isinstance(value, MergedMetric)}
    if not ours:
        return wrapped(*args, **kwargs)
    aggregation = kwargs["aggregation"] if "aggregation" in kwargs else args[1]
    theirs = wrapped({key: value for key, value in data.items() if key not in ours}, aggregation)
    return {**theirs, **ours}


def _aggregate_dp(wrapped, instance, args, kwargs):
    metrics = kwargs.get("metric_lists", args[0] if args else [])
    if not metrics or not isinstance(metrics[0], MergedMetric):
        return wrapped(*args, **kwargs)
    return MergedMetric(piece for metric in metrics for piece in metric.values).merged()
