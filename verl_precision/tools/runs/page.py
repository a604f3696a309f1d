"""The report: one HTML file with curves, alarms and tables; it loads nothing, and works without a network."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file
from verl_precision.mismatch.alarm import MismatchAlarm
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.runs.figures import PANELS, colours_of, draw, points_of
from verl_precision.tools.runs.read import Run
from verl_precision.tools.show.figures import image
from verl_precision.tools.show.pages import mark_of, render

# By this line an earlier report is known, which may be written over.
MARK = mark_of("report")


def page(runs: list[Run], settings: AlarmSettings | None = None, expected: Sequence[Run] = ()) -> str:
    """Return the report about runs with different names; those of one arm are one curve in the figures.

    The alarm runs over the recorded metrics with these settings. Expected curves (`read_expected`) are drawn beside the
    reward. Refused are runs without any of the metrics shown, and too many runs.
    """
    settings = settings or AlarmSettings()
    judges = {run.name: MismatchAlarm(settings) for run in runs}
    alarms = {run.name: [a for row in run.rows for a in judges[run.name].update(int(row["step"]), row)] for run in runs}
    panels, missing = [], []
    for panel in PANELS:
        curves = []
        for label, metric in panel.metrics.items():
            found = [(run, points_of(run, metric)) for run in runs]
            curves += _curves(label, [pair for pair in found if pair[1]])
            without = [run.name for run, points in found if not points]
            who = "no run" if len(without) == len(runs) else f"not {', '.join(without)}"
            missing += [f"{panel.title_of(label)} ({metric}): {who}"] if without else []
        if curves:
            steps = sorted({step for curve in curves for step in curve["points"]})
            picture = image(draw([panel], runs, alarms, expected), panel.name)
            panels.append({"panel": panel, "image": picture, "curves": curves, "steps": steps})
    if not panels:
        problem, value = "none of the metrics of the report is there", ", ".join(str(run.path) for run in runs)
        allowed = "metrics of a verl training run (critic/score/mean, mismatch/k3_kl, ...)"
        remedy = "Name the run's own metrics file."
        raise ConfigurationError(problem, setting="RUN", value=value, allowed=allowed, remedy=remedy)
    return render(
        "runs/page.html",
        "report",
        runs=runs,
        expected=expected,
        colours=colours_of(runs),
        bands=len({run.curve for run in runs}) < len(runs),
        alarms=alarms,
        baseline_missing={name: judge.baseline_missing for name, judge in judges.items()},
        settings=settings,
        panels=panels,
        missing=missing,
    )


def write_page(path: Path, content: str, force: bool = False) -> None:
    """Write the report; refuse to replace a file, unless by `force`, that is not an earlier report."""
    if not path.absolute().parent.is_dir():
        problem, allowed = f"{path.parent} is not a folder", "a file in a folder that exists"
        remedy = "Make the folder first."
    elif path.exists() and not force and not (path.is_file() and MARK.encode() in path.read_bytes()[:2000]):
        problem, allowed = "it exists and is not an earlier report", "a new file or an earlier report"
        remedy = "Name another file, or add --force."
    else:
        write_file(path, content, replace=True)
        return
    problem += "; nothing was written"
    raise ConfigurationError(problem, setting="--output", value=str(path), allowed=allowed, remedy=remedy)


def _curves(label: str, found: Sequence[tuple[Run, dict[int, float]]]) -> list[dict[str, Any]]:
    """Return what the page shows of a metric of each run that has measured it.

    The smallest and the largest value leave NaN out, the mean does not. The ratio is the first run's mean over the
    own; it is None for the first run, and where a mean is zero or not finite, or the two have different signs.
    """
    curves: list[dict[str, Any]] = []
    for run, points in found:
        values = list(points.values())
        numbers = [value for value in values if not math.isnan(value)] or [math.nan]
        mean = sum(values) / len(values)
        first = curves[0]["summary"][0] if curves else math.nan
        related = math.isfinite(first) and math.isfinite(mean) and first and mean and (first > 0) == (mean > 0)
        summary = mean, values[0], values[-1], min(numbers), max(numbers)
        ratio = first / mean if related else None
        curves.append({"label": label, "run": run, "points": points, "summary": summary, "ratio": ratio})
    return curves
