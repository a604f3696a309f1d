"""What the page shows, as JSON: runs, alarms, curves, summaries; `report` writes it into the page, `watch` sends it.

A long curve has a few hundred points: of each bucket of steps the mean, the smallest and the largest value. CSV has all
points.
"""

import csv
import functools
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from verl_precision.base.terminal import printable
from verl_precision.mismatch.metric_names import ACTOR, PROBS_PEARSON
from verl_precision.tools.runs.panels import PANELS, REWARD, Panel, mean
from verl_precision.tools.runs.read import Run
from verl_precision.tools.runs.rows import Rows
from verl_precision.tools.runs.standing import Points

BUCKETS = 160  # of a curve of more than twice as many steps
JsonNumber = float | str  # one that is not finite is a text that JavaScript's Number() knows
Series = list[list[JsonNumber]]  # steps, values, and of several seeds the smallest and the largest value
Summary = dict[str, list[JsonNumber]]  # curve -> numbers about it
Place = tuple[str, int, int | None, bool]  # curve; which of `a or b`; layer; whether verl's `actor/` is before the name

_CURVES = tuple((panel, label, metric) for panel in PANELS for label, metric in panel.metrics.items())
_ACTING = next(panel for panel in PANELS if panel.name == "acting")
_PEARSON = next(panel.curve_of(label) for panel, label, metric in _CURVES if metric == PROBS_PEARSON)
SHOWN = {name for *_, metric in _CURVES for name in metric.split(" or ")}  # names of metrics


def json_number(value: float, digits: int = 7) -> JsonNumber:
    """Return a number as JSON has it, with so many digits."""
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class Columns:
    """The curves of a run, which rows are added to."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], dict[int, float]] = {}  # curve and which of `a or b` -> value by step
        self._layers: dict[str, dict[int, list[float]]] = {}  # curve -> sum and number of each layer

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a step, which replaces that step's earlier one, but for means over all steps."""
        step = int(row["step"])
        for key, value in row.items():
            if (place := _place_of(key)) is None:
                continue
            curve, which, layer, prefixed = place
            if layer is not None:
                total = self._layers.setdefault(curve, {}).setdefault(layer, [0.0, 0.0])
                total[0] += value
                total[1] += 1
            elif not prefixed or key.removeprefix(ACTOR) not in row:
                self._found.setdefault((curve, which), {})[step] = 1 - value if curve == _PEARSON else value

    def points(self) -> Points:
        """Return every curve that has points."""
        found: dict[str, Mapping[int, float]] = {}
        for (curve, _), points in sorted(self._found.items(), key=lambda each: each[0]):
            found.setdefault(curve, points)
        for curve, layers in self._layers.items():
            found[curve] = {layer: total / count for layer, (total, count) in sorted(layers.items())}
        return found


@functools.cache
def _place_of(key: str) -> Place | None:
    """Return where a metric of this name is shown, or None."""
    prefixed = key.startswith(ACTOR)
    begin, _, end = key.rpartition("_")
    for panel, label, metric in _CURVES:
        for which, name in enumerate(metric.split(" or ")):
            if name == f"{begin}_*" and re.fullmatch("[0-9]{1,9}", end):
                return panel.curve_of(label), which, int(end), False
            if key in (name, ACTOR + name):
                return panel.curve_of(label), which, None, prefixed and key != name
    return None


def points_of(rows: Rows) -> Points:
    """Return every curve of a run: value by step, or by layer; where it was not measured there is no point."""
    columns = Columns()
    for row in rows:
        columns.add(row)
    return columns.points()


@np.errstate(over="ignore", invalid="ignore")
def downsampled(steps: Sequence[int], rows: Sequence[Sequence[float]], buckets: int = BUCKETS) -> list[list[float]]:
    """Return a long curve in so many buckets of steps: steps, means, lows, highs.

    The mean of a bucket is NaN where a value in it is not finite; low and high are of those that are. Its step is that
    of the value that is furthest from the mean, or not finite: who asks for a spike is led to it. The buckets at the
    ends have the first and the last step.

    Args:
        steps: At least two.
        rows: Values; or means, smallest and largest values of several seeds.
        buckets: How many, at least 2.
    """
    means, lows, highs = (np.array(row, dtype=np.float64) for row in (rows if len(rows) == 3 else [rows[0]] * 3))
    starts = np.unique([bucket * len(steps) // buckets for bucket in range(buckets)])
    sizes = np.diff([*starts, len(steps)])
    finite = np.isfinite(means)
    whole = np.logical_and.reduceat(finite, starts)
    mean = np.where(whole, np.add.reduceat(np.where(finite, means, 0.0), starts) / sizes, np.nan)
    low, high = (np.where(np.isfinite(row), row, np.nan) for row in (lows, highs))
    away = np.fmax(high - np.repeat(mean, sizes), np.repeat(mean, sizes) - low)
    away = np.where(np.repeat(whole, sizes), away, np.where(finite, -np.inf, np.inf))
    shown = [
        steps[start + int(np.argmax(away[start : start + size]))] for start, size in zip(starts, sizes, strict=True)
    ]
    shown[0], shown[-1] = steps[0], steps[-1]
    return [shown, mean.tolist(), np.fmin.reduceat(low, starts).tolist(), np.fmax.reduceat(high, starts).tolist()]


def band_of(seeds: Sequence[Mapping[int, float]]) -> list[list[float]]:
    """Return steps and values; for several seeds, or a long curve, means (NaN where one is not finite), lows, highs."""
    if len(seeds) == 1:
        steps, rows = list(seeds[0]), [list(seeds[0].values())]
    else:
        steps = sorted({step for points in seeds for step in points})
        values = [[points[step] for points in seeds if step in points] for step in steps]
        finite = [[value for value in each if math.isfinite(value)] or [math.nan] for each in values]
        rows = [[mean(each) if all(map(math.isfinite, each)) else math.nan for each in values]]
        rows += [[min(each) for each in finite], [max(each) for each in finite]]
    if len(steps) > 2 * BUCKETS:
        return downsampled(steps, rows)
    return [list(steps), *rows]


def series_of(seeds: Sequence[Mapping[int, float]]) -> Series:
    """Return a curve as JSON has it."""
    steps, *rows = band_of(seeds)
    return [[int(step) for step in steps], *([json_number(value, 5) for value in row] for row in rows)]


def curves_of(runs: Sequence[Points]) -> dict[str, Series]:
    """Return the curves of the runs of one arm, or of a run of its own."""
    keys = [panel.curve_of(label) for panel, label, _ in _CURVES]
    return {key: series_of(seeds) for key in keys if (seeds := [points[key] for points in runs if key in points])}


def actions_of(points: Points) -> list[str]:
    """Return, in words, in which steps the alarm did something about the run."""
    found = []
    for label, metric in _ACTING.metrics.items():
        for acts, group in groupby(points.get(_ACTING.curve_of(label), {}).items(), key=lambda point: point[1] > 0):
            if acts:
                steps = [step for step, _ in group]
                found.append(f"{metric.partition('/')[2]} from step {steps[0]} to {steps[-1]}")
    return found


def panels_content() -> list[dict[str, Any]]:
    """Return the panels, with the words under which each curve is known."""
    return [
        {**panel._asdict(), "titles": {label: panel.title_of(label) for label in panel.metrics}} for panel in PANELS
    ]


def expected_content(curves: Iterable[Run]) -> list[dict[str, Any]]:
    """Return the expected curves of the reward."""
    found = ((each, points_of(each.rows)[REWARD.curve]) for each in curves)
    return [
        {"name": each.name, "path": printable(str(each.path)), "points": series_of([points])} for each, points in found
    ]


def missing(runs: Mapping[str, Points]) -> list[str]:
    """Return, in words, which metric which of the runs, by their names, have not measured."""
    found = []
    for panel, label, metric in _CURVES:
        without = [name for name, points in runs.items() if panel.curve_of(label) not in points]
        who = "no run" if len(without) == len(runs) else f"not {', '.join(without)}"
        found += [f"{panel.title_of(label)} ({metric}): {who}"] if without else []
    return found


def csv_of(panel: Panel, runs: Mapping[str, Points]) -> str:
    """Return every point of a panel as CSV, a column for each run and metric."""
    columns = {
        name if len(panel.metrics) == 1 else f"{name} · {label}": points[key]
        for name, points in runs.items()
        for label in panel.metrics
        if (key := panel.curve_of(label)) in points
    }
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([panel.axis, *columns])
    for step in sorted({step for points in columns.values() for step in points}):
        writer.writerow([step, *(repr(points[step]) if step in points else "" for points in columns.values())])
    return out.getvalue()


@np.errstate(over="ignore", invalid="ignore")
def summary_of(curves: Points) -> Summary:
    """Return of each curve mean, first, last, smallest and largest value, which leave NaN out, and their number."""
    found: Summary = {}
    for key, points in curves.items():
        values = np.fromiter(points.values(), np.float64, len(points))
        numbers = values[~np.isnan(values)]
        ends = (numbers.min(), numbers.max()) if numbers.size else (math.nan, math.nan)
        found[key] = [*map(json_number, map(float, (values.mean(), values[0], values[-1], *ends))), len(values)]
    return found
