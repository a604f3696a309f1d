"""What the page shows, as JSON: runs, alarms, curves, summaries; `report` writes it into the page, `watch` sends it.

A long curve has a few hundred points: of each bucket of steps the mean, the smallest and the largest value. CSV has all
points.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from verl_precision.base.terminal import printable
from verl_precision.mismatch.alarm import Alarm
from verl_precision.mismatch.metric_names import ACTOR, PROBS_PEARSON
from verl_precision.tools.runs.panels import PANELS, Panel, layer_of, mean, points_of
from verl_precision.tools.runs.read import REWARD, Run
from verl_precision.tools.runs.standing import Points, Standing, curve_key

BUCKETS = 160  # of a curve of more than twice as many steps
Wire = float | str  # a number as JSON has it: one that is not finite is a text that JavaScript's Number() knows
Series = list[list[Wire]]  # steps, values, and of several seeds the smallest and the largest value
Summary = dict[str, list[Wire]]  # curve -> numbers about it


def wire(value: float, digits: int = 7) -> Wire:
    """Return a number as JSON has it, with so many digits."""
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _all() -> Iterable[tuple[Panel, str, str]]:
    return ((panel, label, metric) for panel in PANELS for label, metric in panel.metrics.items())


_ACTING = next(panel for panel in PANELS if panel.name == "acting")
_PEARSON = next(curve_key(panel, label) for panel, label, metric in _all() if metric == PROBS_PEARSON)


class Columns:
    """The curves of a run, which rows are added to: as `panels.points_of`, at a hundredth of its time for a row."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], dict[int, float]] = {}  # curve and which of `a or b` -> value by step
        self._layers: dict[str, dict[int, list[float]]] = {}  # curve -> sum and number of each layer

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a step, which replaces that step's earlier one, but for means over all steps."""
        step = int(row["step"])
        for key, value in row.items():
            place = _PLACES.get(key)
            if place is None:
                place = _PLACES[key] = _place_of(key)
            if place is _NOWHERE:
                continue
            curve, which, layer, prefixed = place
            if layer is not None:
                total = self._layers.setdefault(curve, {}).setdefault(layer, [0.0, 0.0])
                total[0] += value
                total[1] += 1
            elif not prefixed or key.removeprefix(ACTOR) not in row:
                points = self._found.setdefault((curve, which), {})
                points[step] = 1 - value if curve == _PEARSON else value

    def points(self) -> Points:
        """Return every curve that has points."""
        found: dict[str, Mapping[int, float]] = {}
        for (curve, _), points in sorted(self._found.items(), key=lambda each: each[0]):
            found.setdefault(curve, points)
        for curve, layers in self._layers.items():
            found[curve] = {layer: total / count for layer, (total, count) in sorted(layers.items())}
        return found


Place = tuple[str, int, int | None, bool]  # curve; which of `a or b`; layer; whether verl's `actor/` is before the name
_NOWHERE: Place = ("", 0, None, False)
_PLACES: dict[str, Place] = {}  # of every name of a metric that was met


def _place_of(key: str) -> Place:
    prefixed = key.startswith(ACTOR)
    for panel, label, metric in _all():
        for which, name in enumerate(metric.split(" or ")):
            if name.endswith("_*"):
                if (layer := layer_of(key, name)) is not None:
                    return curve_key(panel, label), which, layer, False
            elif key in (name, ACTOR + name):
                return curve_key(panel, label), which, None, prefixed and key != name
    return _NOWHERE


@np.errstate(over="ignore", invalid="ignore")
def thinned(steps: Sequence[int], rows: Sequence[Sequence[float]], buckets: int = BUCKETS) -> list[list[float]]:
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


def series_of(seeds: Sequence[Mapping[int, float]]) -> Series:
    """Return a curve, for several seeds their mean with the range that is finite; NaN where a seed is not finite."""
    if len(seeds) == 1:
        steps, rows = list(seeds[0]), [list(seeds[0].values())]
    else:
        steps = sorted({step for points in seeds for step in points})
        values = [[points[step] for points in seeds if step in points] for step in steps]
        finite = [[value for value in each if math.isfinite(value)] or [math.nan] for each in values]
        rows = [[mean(each) if all(map(math.isfinite, each)) else math.nan for each in values]]
        rows += [[min(each) for each in finite], [max(each) for each in finite]]
    if len(steps) > 2 * BUCKETS:
        shown, *rows = thinned(steps, rows)
        steps = [int(step) for step in shown]
    return [list(steps), *([wire(value, 5) for value in row] for row in rows)]


def curves_of(runs: Sequence[Points]) -> dict[str, Series]:
    """Return the curves of the runs of one arm, or of a run of its own."""
    found: dict[str, Series] = {}
    for panel, label, _ in _all():
        key = curve_key(panel, label)
        if seeds := [points[key] for points in runs if key in points]:
            found[key] = series_of(seeds)
    return found


def run_content(
    number: int, run: Run, points: Points, summary: Summary, alarms: Sequence[Alarm], baseline_missing: int,
    stands: Standing, colour: str, kept: int | None = None, problem: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return what the page shows of a run beside its curves; `kept` responses have their tokens on the disk."""
    shown = {key for _, _, metric in _all() for key in metric.split(" or ")}
    return {
        "id": number,
        "name": run.name,
        "curve": run.curve,
        "colour": colour,
        "path": printable(str(run.path)),
        "notes": list(run.notes),
        "problem": problem,
        "first": int(run.rows[0]["step"]) if run.rows else None,
        "standing": {key: wire(found) if isinstance(found, float) else found for key, found in asdict(stands).items()},
        "alarms": [{**asdict(alarm), "seen": wire(alarm.seen), "shown": alarm.metric in shown} for alarm in alarms],
        "actions": actions_of(points),
        "baselineMissing": baseline_missing,
        "summary": summary,
        "kept": kept,
    }


def actions_of(points: Points) -> list[str]:
    """Return, in words, in which steps the alarm did something about the run."""
    found = []
    for label, metric in _ACTING.metrics.items():
        for acts, group in groupby(points.get(curve_key(_ACTING, label), {}).items(), key=lambda point: point[1] > 0):
            if acts:
                steps = [step for step, _ in group]
                found.append(f"{metric.partition('/')[2]} from step {steps[0]} to {steps[-1]}")
    return found


def panels_content() -> list[dict[str, Any]]:
    """Return the panels, with the words under which each curve is known."""
    return [
        {
            **{name: getattr(panel, name) for name in Panel.__annotations__},
            "metrics": dict(panel.metrics),
            "titles": {name: panel.title_of(name) for name in panel.metrics},
        }
        for panel in PANELS
    ]


def expected_content(curves: Iterable[Run]) -> list[dict[str, Any]]:
    """Return the expected curves of the reward."""
    return [
        {"name": each.name, "path": printable(str(each.path)), "points": series_of([points_of(each, REWARD)])}
        for each in curves
    ]


def missing(runs: Mapping[str, Points]) -> list[str]:
    """Return, in words, which metric which of the runs, by their names, have not measured."""
    found = []
    for panel, label, metric in _all():
        without = [name for name, points in runs.items() if curve_key(panel, label) not in points]
        who = "no run" if len(without) == len(runs) else f"not {', '.join(without)}"
        found += [f"{panel.title_of(label)} ({metric}): {who}"] if without else []
    return found


def csv_of(panel: Panel, runs: Mapping[str, Points]) -> str:
    """Return every point of a panel as CSV, a column for each run and metric."""
    columns = {
        name if len(panel.metrics) == 1 else f"{name} · {label}": points[key]
        for name, points in runs.items()
        for label in panel.metrics
        if (key := curve_key(panel, label)) in points
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
        found[key] = [*map(wire, map(float, (values.mean(), values[0], values[-1], *ends))), len(values)]
    return found
