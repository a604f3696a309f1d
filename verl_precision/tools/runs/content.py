"""What the page shows of runs, as JSON: for the report, for the live page, and for the figure of a comparison."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from verl_precision.base.errors import error_in_one_line
from verl_precision.base.terminal import printable
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm
from verl_precision.tools.runs.curves import PANELS, Points, band_of, colours_of, numbers_of, points_of
from verl_precision.tools.runs.expected import expected_of
from verl_precision.tools.runs.kept import folder_of, kept_in
from verl_precision.tools.runs.read import Run
from verl_precision.tools.runs.status import RunStatus, status_of, total_steps

T = TypeVar("T")
CurvesContent = Mapping[str, Any]  # curve -> steps, values, and of several seeds the smallest and the largest value


def as_json(content: Any) -> Any:
    """Return content with short numbers; one that is not finite is a text that JavaScript's Number() knows."""
    if isinstance(content, float):
        if math.isfinite(content):
            return float(f"{content:.6g}")
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, Mapping):
        return {key: as_json(value) for key, value in content.items()}
    return [as_json(each) for each in content] if isinstance(content, list | tuple) else content


class RunView:
    """A run, or a place where one may begin, as it is shown. Whatever its files hold is its problem, and no error.

    Without its metrics a run is unreadable; without what lies beside them it is shown all the same. Its curves are
    compared with those `expected`, or with those of its recipe where that is None.
    """

    def __init__(self, run: Run, expected: Sequence[Run] | None = None) -> None:
        self.run, self.points = run, dict[str, Mapping[int, float]]()
        self.kept_folder = folder_of(run.path)
        self.kept: int | None = None  # responses with their tokens
        self._judge, self.alarms = MismatchAlarm(), list[Alarm]()
        self._problems, self._kept_problem, self.status = [run.problem], "", RunStatus("waiting")
        self.readable = not run.problem and self._attempt(self._judged, False)
        self._total = self._attempt(lambda: total_steps(run.path), None) if run.rows else None
        self.expected: Sequence[Run] = expected or ()
        if expected is None and run.rows:
            self.expected = self._attempt(lambda: expected_of(run.path), [])

    def _attempt(self, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except Exception as error:
            self._problems.append(error_in_one_line(error))
            return otherwise

    def _judged(self) -> bool:
        self.alarms = [alarm for row in self.run.rows for alarm in self._judge.update(int(row["step"]), row)]
        self.points = points_of(self.run.rows)
        return True

    def look(self, age: float | None = None) -> None:
        """Judge where the run stands whose newest row has this age in seconds, and what it has kept; None: recorded."""
        kept, self._kept_problem = kept_in(self.kept_folder)
        self.kept = None if kept is None else len(kept)
        self.status = RunStatus("unreadable")
        if self.readable:
            self.status = status_of(self.run, self.points, self._total, age, self.expected)

    @property
    def problem(self) -> str:
        """Return what of it cannot be read, and why, a line for each."""
        return "\n".join(map(printable, filter(None, (*self._problems, self._kept_problem))))

    def content(self, number: int, colour: str) -> dict[str, Any]:
        """Return what the page shows of the run, but for its curves."""
        return {
            "id": number,
            "name": self.run.name,
            "curve": self.run.curve,
            "colour": colour,
            "path": printable(str(self.run.path)),
            "notes": self.run.notes,
            "problem": self.problem,
            "standing": asdict(self.status),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "baselineMissing": self._judge.baseline_missing,
            "summary": {name: numbers_of(points) for name, points in self.points.items()},
            "kept": self.kept,
        }


def curves_of(runs: Iterable[Points]) -> CurvesContent:
    """Return the curves of the runs of one arm, or of a run of its own."""
    of_curve: dict[str, list[Mapping[int, float]]] = {}
    for name, points in ((name, points) for run in runs for name, points in run.items()):
        of_curve.setdefault(name, []).append(points)
    return {name: as_json(band_of(seeds)) for name, seeds in of_curve.items()}


def page_content(views: Mapping[int, RunView], curves: Mapping[str, CurvesContent], version: int = 1) -> dict[str, Any]:
    """Return all that the page shows: runs by their numbers, and some or all of their curves.

    Expected curves are shown where they are the same for all runs.
    """
    colours = colours_of([view.run for view in views.values()])
    begun = [view for view in views.values() if view.points]
    expected = begun[0].expected if begun and all(view.expected == begun[0].expected for view in begun) else []
    measured = {name.partition("/")[0] for view in begun for name in view.points}
    return {
        "version": version,
        "runs": as_json([view.content(number, colours[view.run.curve]) for number, view in views.items()]),
        "curves": curves,
        "expected": [_expected_content(curve) for curve in expected],
        "missing": [panel.title for panel in PANELS if panel.name not in measured] if begun else [],
    }


def _expected_content(curve: Run) -> dict[str, Any]:
    reward = curves_of([points_of(curve.rows)])[PANELS[0].curve]
    return {"name": curve.name, "path": printable(str(curve.path)), "points": reward}


def recorded_content(runs: Sequence[Run], expected: Sequence[Run] | None = None) -> dict[str, Any]:
    """Return what the page shows of runs that are not followed, which have different names."""
    views = [RunView(run, expected) for run in runs]
    for view in views:
        view.look()
    names = dict.fromkeys(run.curve for run in runs)
    own = {name: [view.points for view in views if view.run.curve == name] for name in names}
    return page_content(dict(enumerate(views)), {name: curves_of(points) for name, points in own.items()})
