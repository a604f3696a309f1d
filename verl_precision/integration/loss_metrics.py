"""Carries `Statistic`s through verl, which by itself averages whatever a policy loss reports.

verl's `Metric` knows mean, sum, min and max, but `ppo_loss` forces MEAN on everything a policy loss returns, and the
reduction over ranks is a class method of `Metric` that no subclass can change. Both are wrapped: a `MergedMetric` stays
what it is, anything else passes through unchanged. Over the mini-batches of a step verl then takes the maximum of keys
with `max`, the minimum of keys with `min`, and else the mean.
"""

from collections.abc import Sequence

from verl.utils.metric import AggregationType, Metric

from verl_precision.integration.ledger import wrap_once
from verl_precision.losses.metrics import Statistic, merge


class MergedMetric(Metric):
    """A `Statistic` per micro-batch, merged before anything is computed from them."""

    def __init__(self, statistics: Sequence[Statistic] = ()) -> None:
        super().__init__(AggregationType.MEAN)  # verl compares the type of metrics it joins
        self.values: list[Statistic] = []
        for statistic in statistics:
            self.append(statistic)

    def append(self, value: "Statistic | MergedMetric") -> None:
        """Add one micro-batch, or those of another metric."""
        if isinstance(value, MergedMetric):
            self.values.extend(value.values)
        else:  # what travels between processes holds no device memory
            self.values.append(Statistic(value.kind, value.parts.detach().cpu(), value.q))

    def extend(self, values: "Sequence[Statistic] | MergedMetric") -> None:
        """Add several micro-batches."""
        for value in values.values if isinstance(values, MergedMetric) else values:
            self.append(value)

    def aggregate(self) -> float:
        """Return the metric of everything added so far."""
        return merge(self.values).value()

    def init_list(self) -> "MergedMetric":
        """Return an empty metric of the same sort."""
        return MergedMetric()

    @classmethod
    def over_ranks(cls, metrics: "Sequence[MergedMetric]") -> "float | MergedMetric":
        """Return the metric of all micro-batches of all ranks."""
        return merge([statistic for metric in metrics for statistic in metric.values]).value()


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
    return type(metrics[0]).over_ranks(metrics)
