"""Carries `Sums` from the worker's micro-batches to the driver, through verl's metrics.

A number would lose what merging needs. So each micro-batch reports its sums as one metric under one key, they are
merged over micro-batches, ranks and mini-batches, and the driver takes them out before anything is logged.
"""

import functools
from collections.abc import Sequence

from verl_precision.integration.loss_metrics import MergedMetric
from verl_precision.mismatch.merging import Sums

MISMATCH = "verl_precision/mismatch_sums"
PHANTOM = "verl_precision/phantom_sums"


class CarriedSums(MergedMetric):
    """One `Sums` per micro-batch; its value is the `Sums` of all."""

    def __init__(self, sums: Sequence[Sums] = ()) -> None:
        super().__init__()
        self.values: list[Sums] = list(sums)  # type: ignore[assignment]

    def append(self, value: "Sums | CarriedSums") -> None:  # type: ignore[override]
        """Add one micro-batch, or those of another metric."""
        self.values.extend(value.values if isinstance(value, CarriedSums) else [value])

    def aggregate(self) -> Sums:  # type: ignore[override]
        """Return everything added so far, merged."""
        return functools.reduce(lambda a, b: a.merge(b), self.values)

    def init_list(self) -> "CarriedSums":
        """Return an empty metric of the same sort."""
        return CarriedSums()

    @classmethod
    def over_ranks(cls, metrics: "Sequence[CarriedSums]") -> "CarriedSums":  # type: ignore[override]
        """Return one metric for all ranks: it stays one until the driver has it."""
        return CarriedSums([CarriedSums([s for metric in metrics for s in metric.values]).aggregate()])
