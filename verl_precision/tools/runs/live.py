"""Runs as they are now: read on whenever somebody asks, and what has changed since somebody asked last."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.base.terminal import printable
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm
from verl_precision.tools.runs.contents import (
    SHOWN,
    Columns,
    Series,
    Summary,
    actions_of,
    curves_of,
    expected_content,
    json_number,
    missing,
    summary_of,
)
from verl_precision.tools.runs.expected import expected_by_recipe
from verl_precision.tools.runs.kept import KeptList
from verl_precision.tools.runs.panels import colours_of
from verl_precision.tools.runs.read import Follower, OnProgress, Run, names_of, sources_in
from verl_precision.tools.runs.standing import Points, RunStatus, standing, total_steps

_NEEDED = ("file", "rows", "standing", "curves")  # parts without which there is nothing to show


class LiveRun:
    """One run, or a place where one may begin. Whatever its files hold is the problem of this run, and no error.

    Without its metrics a run is unreadable; without what lies beside them it is shown all the same. Its curves are
    compared with those `expected`, or with those of its recipe where that is None.
    """

    def __init__(self, number: int, source: Path, follower: Follower | None, expected: Sequence[Run] | None) -> None:
        self.number, self.source, self.follower = number, source, follower
        self.kept = KeptList(source)
        self.run = Run(source.name, source, [])
        self.expected: Sequence[Run] = expected or []
        self.stands = RunStatus("waiting")
        self._by_recipe = expected is None
        self._total: int | None = None
        self._faults: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self.points: Points = {}
        self.summary: Summary = {}
        self.alarms: list[Alarm] = []
        self._judge, self._columns, self._known = MismatchAlarm(), Columns(), 0

    @contextmanager
    def noting(self, part: str) -> Iterator[None]:
        """Whatever is raised inside is a fault of this part of this run."""
        self._faults.pop(part, None)
        try:
            yield
        except Exception as error:
            self._faults[part] = error_in_one_line(error)
            if part in _NEEDED:
                self._forget()

    @property
    def problem(self) -> str:
        """Return what of it cannot be read, and why, a line for each."""
        return "\n".join(map(printable, filter(None, (self.run.problem, *self._faults.values(), self.kept.problem))))

    def read_on(self, name: str) -> bool:
        """Read what is new under a name; return whether there is anything."""
        renamed, had, first = name != self.run.name, self.problem, None
        with self.noting("file"):
            first = self.follower.read_on() if self.follower else None
        if new := first is not None or renamed or had != self.problem:
            self.run = self.follower.run(name) if self.follower else Run(name, self.source, [])
        if first is not None:
            self.take(self.run, first)
        return new

    def take(self, run: Run, first: int = 0) -> None:
        """Take in the rows of a run from the first that has changed, and what lies beside them."""
        self.run, self._total = run, None
        with self.noting("rows"):
            if first < self._known:
                self._forget()
            for row in run.rows[self._known :]:
                self.alarms += self._judge.update(int(row["step"]), row)
                self._columns.add(row)
            self._known, self.points = len(run.rows), self._columns.points()
            self.summary = summary_of(self.points)
        with self.noting("length"):
            self._total = total_steps(self.source) if run.rows else None
        with self.noting("expected"):
            if self._by_recipe:
                self.expected = expected_by_recipe(self.source) if run.rows else []

    def look(self, now: float | None) -> bool:
        """Judge where the run stands; return whether the state, or what it has kept, is another one. None: recorded."""
        former, kept, age = self.stands.state, self.kept.read_on(), None
        with self.noting("standing"):
            if now is not None and self.follower is not None:
                age = max(0.0, now - self.follower.written)
            self.stands = standing(self.run, self.points, self._total, age, self.expected)
        if self.run.problem or any(part in self._faults for part in _NEEDED):
            self.stands = RunStatus("unreadable")
        return kept or self.stands.state != former

    def content(self, colour: str, problem: str = "") -> dict[str, Any]:
        """Return what the page shows of the run, but for its curves."""
        run, stands = self.run, asdict(self.stands)
        alarms = [
            {**asdict(alarm), "seen": json_number(alarm.seen), "shown": alarm.metric in SHOWN} for alarm in self.alarms
        ]
        return {
            "id": self.number,
            "name": run.name,
            "curve": run.curve,
            "colour": colour,
            "path": printable(str(run.path)),
            "notes": list(run.notes),
            "problem": self.problem or problem,
            "first": int(run.rows[0]["step"]) if run.rows else None,
            "standing": {key: json_number(each) if isinstance(each, float) else each for key, each in stands.items()},
            "alarms": alarms,
            "actions": actions_of(self.points),
            "baselineMissing": self._judge.baseline_missing,
            "summary": self.summary,
            "kept": self.kept.count,
        }


def content_of(
    version: int,
    runs: Sequence[LiveRun],
    curves: Mapping[str, Mapping[str, Series]],
    expected: Iterable[Run],
    problems: Mapping[Path, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return all that the page shows: the runs, some or all of their curves, and what has gone wrong with sources."""
    colours = colours_of([run.run for run in runs])
    return {
        "version": version,
        "runs": [run.content(colours[run.run.curve], problems.get(run.source, "")) for run in runs],
        "curves": curves,
        "expected": expected_content(expected),
        "missing": missing({run.run.name: run.points for run in runs if run.points}),
    }


class Live:
    """All runs of some paths. Any thread may ask.

    Args:
        paths: Files and folders of runs, and folders in which runs may begin.
        expected: Curves of the expected reward; without, those of the recipe of each run.
        pause_seconds: Files are not looked at again before so many seconds have gone.
        on_progress: Is told of every part of a file that has been read.

    Raises:
        ConfigurationError: If a path is not there or is given twice.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        expected: Sequence[Run] = (),
        pause_seconds: float = 0.5,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._on_progress = on_progress
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
        names_of([source for path in paths for source in sources_in(path) or [path]])  # later, no path is refused
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
            curves = {name: found for name, found in self._curves.items() if self._changed[name] > since}
            expected = {(each.name, each.path): each for run in runs for each in run.expected}.values()
            return content_of(self._version, runs, curves, expected, self._problems)

    def _read_on(self) -> None:
        if time.monotonic() - self._looked < self._pause:
            return
        found: dict[Path, bool] = {}  # whether a run has begun there
        for path in self.paths:
            self._problems.pop(path, None)
            try:
                sources = sources_in(path)
            except (ConfigurationError, OSError) as error:  # it has gone
                self._problems[path] = error_in_one_line(error)
                sources = [each for each, run in self._runs.items() if run.follower and path in (each, *each.parents)]
            found |= dict.fromkeys(sources, True) or {path: False}
        gone = [run for run in self._runs.values() if found.get(run.source) is not (run.follower is not None)]
        for run in gone:
            del self._runs[run.source]
        names = dict(zip(found, names_of(list(found)), strict=True))
        for source, begun in found.items():
            if source not in self._runs:
                follower = Follower(source, self._on_progress) if begun else None
                self._runs[source] = LiveRun(self._count, source, follower, self._given or None)
                self._count += 1
        self._runs = {source: self._runs[source] for source in found}
        stale = {run.run.curve for run in gone}
        for source, run in self._runs.items():
            former = run.run.curve
            if run.read_on(names[source]):
                stale |= {former, run.run.curve}
            if run.look(time.time()):
                stale.add("")  # no curve
        if stale:
            self._version += 1
            self._draw(stale - {""})
        self._looked = time.monotonic()

    def _draw(self, stale: set[str]) -> None:
        for name in stale:
            self._curves.pop(name, None)
            if own := [run for run in self._runs.values() if run.run.curve == name]:
                with own[0].noting("curves"):
                    self._curves[name], self._changed[name] = curves_of([run.points for run in own]), self._version
