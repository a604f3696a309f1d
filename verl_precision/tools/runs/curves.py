"""Which metrics are shown, under which titles and in which colours; the curves of a run: its rows by metric."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from verl_precision.base.files import table_of
from verl_precision.mismatch.metric_names import ACTOR, PROBS_PEARSON
from verl_precision.tools.runs.read import Rows, Run
from verl_precision.tools.show.colours import COLOURS, PRECISIONS

BUCKETS = 160  # points of a curve that has more than twice as many steps
Points = Mapping[str, Mapping[int, float]]  # `<panel>/<label>` -> value by step, or by layer


class Panel(NamedTuple):
    """One plot."""

    name: str  # its id on the page
    title: str
    unit: str  # label of the vertical axis
    metrics: Mapping[str, str]  # label -> metric, at most four; `a or b`: the first that a run has
    log: int = 0  # base of a logarithmic axis, on which only positive values are drawn; 0 for a linear axis
    hint: str = ""  # how to read the plot
    # What the horizontal axis counts; "layer" for a metric that ends in `_*`: each layer's mean over all steps.
    axis: str = "step"


PANELS = tuple(Panel(**known) for known in table_of(__file__))
LIMITS: Mapping[str, Sequence[Mapping[str, Any]]] = table_of(__file__, "limits.yaml")  # metric -> bars of its number
_CURVES = {f"{panel.name}/{label}": metric for panel in PANELS for label, metric in panel.metrics.items()}
_PEARSON = next(curve for curve, metric in _CURVES.items() if metric == PROBS_PEARSON)


def colours_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the colour of each curve; a precision has one colour in all figures, and many curves repeat colours."""
    curves = list(dict.fromkeys(run.curve for run in runs))
    known = {name: PRECISIONS[name] for name in curves if name in PRECISIONS}
    others = cycle([colour for colour in COLOURS if colour not in known.values()])
    return {name: known.get(name) or next(others) for name in curves}


def points_of(rows: Rows) -> dict[str, Mapping[int, float]]:
    """Return each curve of a run that has points: the value of each step, or the mean over all steps of each layer."""
    keys, found = {key for row in rows for key in row}, dict[str, Mapping[int, float]]()
    for curve, metric in _CURVES.items():
        points: dict[int, float] = {}
        for name in reversed(metric.split(" or ")):
            if name.endswith("*"):
                layers = {key for key in keys if re.fullmatch(re.escape(name[:-1]) + "[0-9]{1,9}", key)}
                points = {int(key[len(name) - 1 :]): mean(row[key] for row in rows if key in row) for key in layers}
            elif read := [key for key in (ACTOR + name, name) if key in keys]:  # the key without verl's prefix wins
                points = {int(row["step"]): row[key] for key in read for row in rows if key in row}
        if points:
            found[curve] = {at: 1 - value if curve == _PEARSON else value for at, value in sorted(points.items())}
    return found


def mean(values: Iterable[float]) -> float:
    """Return a mean, which may be infinite or NaN; `fmean` raises an error for infinities and very large numbers."""
    found = list(values)
    return sum(found) / len(found)


def band_of(seeds: Sequence[Mapping[int, float]]) -> list[list[float]]:
    """Return steps and values; for several seeds or a long curve, means (NaN if a value is not finite), lows, highs."""
    if len(seeds) == 1:
        steps, rows = list(seeds[0]), [list(seeds[0].values())]
    else:
        steps = sorted({step for points in seeds for step in points})
        values = [[points[step] for points in seeds if step in points] for step in steps]
        finite = [[value for value in each if math.isfinite(value)] or [math.nan] for each in values]
        rows = [[mean(each) if all(map(math.isfinite, each)) else math.nan for each in values]]
        rows += [[min(each) for each in finite], [max(each) for each in finite]]
    return [list(steps), *rows] if len(steps) <= 2 * BUCKETS else downsampled(steps, rows)


@np.errstate(over="ignore", invalid="ignore")
def downsampled(steps: Sequence[int], rows: Sequence[Sequence[float]], buckets: int = BUCKETS) -> list[list[float]]:
    """Return steps, means, lows and highs of a long curve in `buckets` buckets; `rows`: values, or means, lows, highs.

    The mean of a bucket is NaN if one of its values is not finite; low and high ignore such values. The step is that of
    the bucket's largest value, so that a click on a spike leads to it; the curve's first and last step stay the ends.
    """
    means, lows, highs = (np.array(row, dtype=np.float64) for row in (rows if len(rows) == 3 else [rows[0]] * 3))
    starts = np.unique([bucket * len(steps) // buckets for bucket in range(buckets)])
    ends = [*starts[1:], len(steps)]
    mean = np.add.reduceat(np.where(np.isfinite(means), means, np.nan), starts) / (ends - starts)
    low, high = (np.where(np.isfinite(row), row, np.nan) for row in (lows, highs))
    highest = np.where(np.isnan(high), -np.inf, high)
    spikes = [start + int(np.argmax(highest[start:end])) for start, end in zip(starts, ends, strict=True)]
    shown = [steps[at] for at in (0, *spikes[1:-1], len(steps) - 1)]
    return [shown, mean.tolist(), np.fmin.reduceat(low, starts).tolist(), np.fmax.reduceat(high, starts).tolist()]


@np.errstate(over="ignore", invalid="ignore")
def numbers_of(points: Mapping[int, float]) -> list[float]:
    """Return mean, first, last, smallest and largest value (the last two without NaN) and the length of a curve."""
    values = np.fromiter(points.values(), np.float64, len(points))
    numbers = values[~np.isnan(values)]
    ends = (numbers.min(), numbers.max()) if numbers.size else (math.nan, math.nan)
    return [*map(float, (values.mean(), values[0], values[-1], *ends)), len(values)]
