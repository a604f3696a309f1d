"""Metrics that can be merged: over micro-batches, over ranks, and the result is that of the whole mini-batch.

The mean of the maxima of micro-batches is not the maximum, and the mean of their effective sample sizes is not the
effective sample size. So a loss reports `Statistic`s: the parts that can be merged without loss, and a formula that is
applied once, after the last merge. `verl_metrics` carries them through verl.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

QUANTILES = (0.05, 0.5, 0.95)
# Weights beyond are held there in mean and effective sample size: float64, in which squares are summed, ends at 1e308.
LARGEST_SQUARED = 1e150


@dataclass(frozen=True)
class Statistic:
    """One mergeable metric.

    Attributes:
        kind: how parts are merged and what is made of them:
            `count` Σ; `mean` (Σ, n) -> Σ/n; `max`; `min`; `ess` (Σw, Σw², n) -> (Σw)² / (n Σw²), a fraction, 0 if no
            weight is left;
            `quantile` all values -> the quantile `q`, linearly interpolated.
        parts: 1-D tensor.
        q: the quantile, for `quantile` only.
    """

    kind: str
    parts: Tensor
    q: float = math.nan

    def value(self) -> float:
        """Return the metric; NaN where it is undefined (the mean of nothing)."""
        parts = self.parts.double()
        match self.kind:
            case "count":
                return parts.sum().item()
            case "mean":
                return (parts[0] / parts[1]).item()
            case "ess":
                return 0.0 if parts[1] == 0 and parts[2] > 0 else (parts[0] ** 2 / (parts[1] * parts[2])).item()
            case "quantile":
                return torch.quantile(parts, self.q).item() if parts.numel() else math.nan
        extreme = (parts.max() if self.kind == "max" else parts.min()).item() if parts.numel() else math.inf
        return extreme if math.isfinite(extreme) else math.nan


def merge(statistics: Sequence[Statistic]) -> Statistic:
    """Merge the statistics of pieces (one or more, of one kind) into that of the whole; order does not matter."""
    first = statistics[0]
    pieces = [statistic.parts.double() for statistic in statistics]
    if first.kind in ("mean", "ess"):
        parts = torch.stack(pieces).sum(dim=0)
    else:
        parts = torch.cat(pieces)
    return Statistic(first.kind, parts, first.q)


class LossOutput(NamedTuple):
    """What a loss returns.

    Attributes:
        loss: scalar; call `loss.backward()`.
        metrics: what to log, by name; see docs/math.md for each.
    """

    loss: Tensor
    metrics: Mapping[str, Statistic]

    def values(self) -> dict[str, float]:
        """Return the metrics as numbers."""
        return {name: statistic.value() for name, statistic in self.metrics.items()}


def count(values: Tensor) -> Statistic:
    """Return the number of true values, or the sum of counts."""
    return Statistic("count", values.sum().reshape(1))


def fraction(hits: Tensor, among: Tensor) -> Statistic:
    """Return the share of `hits` (bool) in `among` (bool of the same shape, or a number)."""
    return Statistic("mean", torch.stack([hits.sum(), among.sum()]))


def extremes(values: Tensor, valid: Tensor, name: str) -> dict[str, Statistic]:
    """Return minimum and maximum over the valid values; a piece without any does not change the merge."""
    lowest = torch.where(valid, values, math.inf).flatten()
    highest = torch.where(valid, values, -math.inf).flatten()
    if values.numel():
        lowest, highest = lowest.amin().reshape(1), highest.amax().reshape(1)
    return {f"{name}_min": Statistic("min", lowest), f"{name}_max": Statistic("max", highest)}


def mean(values: Tensor, valid: Tensor) -> Statistic:
    """Return the mean over the valid values."""
    total = torch.where(valid, values, 0).sum(dtype=torch.float64)
    return Statistic("mean", torch.stack([total, valid.sum().double()]))


def weight_statistics(weights: Tensor, valid: Tensor, name: str = "is_weight") -> dict[str, Statistic]:
    """Describe importance weights: mean (1 is healthy), max, and the effective sample size as a fraction.

    ess = (Σw)² / (n Σw²): 1 if all weights are equal, 1/n if one holds everything.
    """
    kept = torch.where(valid, weights, 0).double().clamp(max=LARGEST_SQUARED)
    total, squares, number = kept.sum(), kept.square().sum(), valid.sum().double()
    return {
        f"actor/{name}_mean": Statistic("mean", torch.stack([total, number])),
        f"actor/{name}_max": extremes(weights, valid, "")["_max"],
        f"actor/{name}_ess": Statistic("ess", torch.stack([total, squares, number])),
    }


def log_ratio_statistics(sequence_log_ratio_B: Tensor, rows_B: Tensor, nonfinite: Tensor) -> dict[str, Statistic]:
    """Describe the log-ratios of whole responses (nats; 0 is on-policy), and count what was left out."""
    values = sequence_log_ratio_B[rows_B]
    statistics = {f"actor/seq_log_ratio_q{round(100 * q):02d}": Statistic("quantile", values, q) for q in QUANTILES}
    return {**statistics, "actor/nonfinite_responses": count(nonfinite)}
