"""Runs as they are now: read on whenever somebody asks, and what has changed since somebody asked last."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm
from verl_precision.tools.runs.contents import (
    Columns,
    Series,
    Summary,
    curves_of,
    expected_content,
    missing,
    run_content,
    summary_of,
)
from verl_precision.tools.runs.expected import expected_by_recipe
from verl_precision.tools.runs.kept import KeptList
from verl_precision.tools.runs.panels import colours_of
from verl_precision.tools.runs.read import Follower, Run, names_of, sources_in
from verl_precision.tools.runs.standing import Points, Standing, standing, total_steps


class LiveRun:
    """One run, or a place where one may begin."""

    def __init__(self, number: int, source: Path, begun: bool) -> None:
        self.number, self.source = number, source
        self.follower = Follower(source) if begun else None
        self.kept = KeptList(source)
        self.problem = ""  # why it cannot be read, in words
        self.run = Run(source.name, source, [])
        self.points: Points = {}
        self.summary: Summary = {}
        self.alarms: list[Alarm] = []
        self.expected: list[Run] = []
        self.stands = Standing("waiting", now={})
        self._judge, self._columns, self._known = MismatchAlarm(), Columns(), 0
        self._total: int | None = None

    @property
    def baseline_missing(self) -> int:
        """Return the steps that the alarm still wants before it looks for growth."""
        return self._judge.baseline_missing

    def read_on(self, name: str) -> bool:
        """Read what is new under a name; return whether there is anything."""
        renamed, had = name != self.run.name, self.problem
        first: int | None = None
        if self.follower is not None:
            try:
                first, self.problem = self.follower.read_on(), ""
            except (VerlPrecisionError, OSError) as error:
                self.problem, first = str(error), 0
            except ValueError as error:  # the source vanished between two looks at it
                self.problem, first = repr(error), 0
            if first is not None or renamed:
                self.run = self.follower.run(name)
        elif renamed:
            self.run = Run(name, self.source, [])
        if first is not None:
            self._total = total_steps(self.source) if self.run.rows else None
            self._go_on_from(first)
        return first is not None or renamed or had != self.problem

    def _go_on_from(self, first: int) -> None:
        """Take in the rows that are new; all of them, where an earlier one has changed."""
        if first < self._known:
            self._judge, self._known, self.alarms, self._columns = MismatchAlarm(), 0, [], Columns()
        for row in self.run.rows[self._known :]:
            self.alarms += self._judge.update(int(row["step"]), row)
            self._columns.add(row)
        self._known, self.points = len(self.run.rows), self._columns.points()
        self.summary = summary_of(self.points)

    def look(self, now: float, expected: Sequence[Run]) -> bool:
        """Judge where the run stands; return whether the state is another one."""
        former = self.stands.state
        age = now - self.follower.written if self.follower is not None else None
        self.stands = standing(self.run, self.points, self._total, age and max(0.0, age), expected)
        if self.problem:
            self.stands = Standing("unreadable", now={})
        return self.stands.state != former


class Live:
    """All runs of some paths. Any thread may ask.

    Args:
        paths: Files and folders of runs, and folders in which runs may begin.
        expected: Curves of the expected reward; without, those of the recipe of each run.
        pause_seconds: Files are not looked at again before so many seconds have gone.

    Raises:
        ConfigurationError: If a path is not there, is given twice, or several files in it could be meant.
    """

    def __init__(self, paths: Sequence[Path], expected: Sequence[Run] = (), pause_seconds: float = 0.5) -> None:
        self.paths = [path.absolute() for path in paths]
        self._given, self._pause = expected, pause_seconds
        self._lock = threading.Lock()
        self._runs: dict[Path, LiveRun] = {}
        # A server that is started again must not take a page's version for its own.
        self._count, self._version = 0, time.time_ns() // 1_000_000
        self._looked = -float("inf")
        self._curves: dict[str, dict[str, Series]] = {}
        self._changed: dict[str, int] = {}  # of each curve, in which version
        self._problems: dict[Path, str] = {}
        try:  # later, no path is refused
            names_of([source for path in paths for source in sources_in(path) or [path]])
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
            raise ConfigurationError(problem, setting="FOLDER", value=str(error.filename)) from error
        self._read_on()

    def runs(self) -> list[LiveRun]:
        """Return the runs as they are now, in order."""
        with self._lock:
            self._read_on()
            return list(self._runs.values())

    def run(self, number: int) -> LiveRun | None:
        """Return the run of a number, None where there is none."""
        return next((run for run in self.runs() if run.number == number), None)

    def points(self) -> Mapping[str, Points]:
        """Return every point of each run, by its name."""
        return {run.run.name: run.points for run in self.runs() if run.points}

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return all of the runs, and the curves that have changed since a version; None where nothing has."""
        with self._lock:
            self._read_on()
            if since == self._version:
                return None
            since = since if 0 < since < self._version else 0
            runs = list(self._runs.values())
            colours = colours_of([run.run for run in runs], again=True)
            return {
                "version": self._version,
                "runs": [
                    run_content(
                        run.number, run.run, run.points, run.summary, run.alarms, run.baseline_missing, run.stands,
                        colours[run.run.curve], run.kept.count, run.problem or self._problems.get(run.source, ""),
                    )
                    for run in runs
                ],
                "curves": {name: found for name, found in self._curves.items() if self._changed[name] > since},
                "expected": expected_content(self._expected()),
                "missing": missing({run.run.name: run.points for run in runs if run.points}),
            }  # fmt: skip

    def _expected(self) -> list[Run]:
        own = {(curve.name, curve.path): curve for run in self._runs.values() for curve in run.expected}
        return list(self._given) or list(own.values())

    def _read_on(self) -> None:
        if time.monotonic() - self._looked < self._pause:
            return
        found: dict[Path, bool] = {}  # whether a run has begun there
        for path in self.paths:
            self._problems.pop(path, None)
            try:
                sources = sources_in(path)
            except (ConfigurationError, OSError) as error:  # several files, or the folder has gone
                self._problems[path] = str(error)
                sources = [each for each, run in self._runs.items() if run.follower and path in (each, *each.parents)]
            found |= dict.fromkeys(sources, True) or {path: False}
        gone = [run for run in self._runs.values() if found.get(run.source) is not (run.follower is not None)]
        for run in gone:
            del self._runs[run.source]
        names = dict(zip(found, names_of(list(found)), strict=True))
        for source, begun in found.items():
            if source not in self._runs:
                self._runs[source] = LiveRun(self._count, source, begun)
                self._count += 1
        self._runs = {source: self._runs[source] for source in found}
        stale = {run.run.curve for run in gone}
        for source, run in self._runs.items():
            former = run.run.curve
            if run.read_on(names[source]):
                stale |= {former, run.run.curve}
                run.expected = [] if self._given or not run.run.rows else expected_by_recipe(source)
            if run.kept.read_on() | run.look(time.time(), self._given or run.expected):
                stale.add("")  # no curve
        if stale:
            self._version += 1
            self._draw(stale - {""})
        self._looked = time.monotonic()

    def _draw(self, stale: set[str]) -> None:
        for name in stale:
            if own := [run.points for run in self._runs.values() if run.run.curve == name]:
                self._curves[name], self._changed[name] = curves_of(own), self._version
            else:
                self._curves.pop(name, None)
