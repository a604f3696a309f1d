"""The content of the page as JSON: recorded runs, live runs, and their kept tokens."""

import functools
import math
import shlex
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.base.terminal import printable
from verl_precision.mismatch.alarm import Alarm
from verl_precision.mismatch.verdict import Judge, Verdict
from verl_precision.tools.kept_tokens import kept_file
from verl_precision.tools.kept_tokens.kept_file import KeptResponse, KeptSummary
from verl_precision.tools.runs.curves import PANELS, Points, band_of, colours_of, numbers_of, points_of
from verl_precision.tools.runs.read import Run, names_of, run_or_problem, sources_in
from verl_precision.tools.runs.status import RunStatus, expected_of, judge_of, status_of, total_steps


def as_json(content: Any) -> Any:
    """Return content with numbers of six digits; NaN and infinities become texts that JavaScript's Number() reads."""
    if isinstance(content, float):
        if math.isfinite(content):
            return float(f"{content:.6g}")
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, Mapping):
        return {key: as_json(value) for key, value in content.items()}
    return [as_json(each) for each in content] if isinstance(content, list | tuple) else content


class RunView:
    """A run, or a place where a run may begin, for the page. Unreadable files set `problem`, and raise no error."""

    def __init__(self, run: Run, number: int, seen: object = None) -> None:
        self.run, self.number, self.seen = run, number, seen  # its number on the page, and the state of its file
        self.points: Points = {}
        self.kept_folder = _kept_folder(run.path)
        self.kept: int | None = None  # number of responses with kept tokens
        self._judge, self.alarms, self.expected = Judge(), list[Alarm](), list[Run]()
        self._problems, self._kept_problem = [run.problem] if run.problem else [], ""
        self.status = RunStatus("waiting")
        self._total: int | None = None
        with self._said():
            self._judge = judge_of(run.path)
        beside = len(self._problems)
        with self._said():
            self.alarms = [alarm for row in run.rows for alarm in self._judge.update(int(row["step"]), row)]
            self.points = points_of(run.rows)
        self.readable = not run.problem and len(self._problems) == beside
        if run.rows:
            with self._said():
                self._total = total_steps(run.path)
            with self._said():
                self.expected = expected_of(run.path)

    @property
    def first_alarms(self) -> dict[str, int]:
        """The step at which each alarm was first raised, in the order of these steps."""
        first: dict[str, int] = {}
        for alarm in self.alarms:
            first.setdefault(alarm.name, alarm.step)
        return first

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._problems.append(error_in_one_line(error))

    def look(self, age: float | None = None) -> None:
        """Update status and kept tokens; `age` is that of the newest row in seconds, None for a recorded run."""
        kept, self._kept_problem = kept_in(self.kept_folder)
        self.kept = None if kept is None else len(kept)
        standing = status_of(self.run, self.points, self._total, age)
        self.status = standing if self.readable else RunStatus("unreadable")

    @property
    def problem(self) -> str:
        """Return which parts of the run cannot be read, and why: one line for each part."""
        return "\n".join(map(printable, filter(None, dict.fromkeys([*self._problems, self._kept_problem]))))

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the run; a command of this package in its action names the run's path."""
        found, path = self._judge.verdict(), printable(shlex.quote(str(self.run.path)))
        for command in ("explain --run", "verl-precision report"):
            found = replace(found, action=found.action.replace(f"{command} FOLDER", f"{command} {path}"))
        return found

    def content(self, colour: str) -> dict[str, Any]:
        """Return what the page shows of the run, except its curves."""
        return {
            "id": self.number,
            "name": self.run.name,
            "curve": self.run.curve,
            "colour": colour,
            "path": printable(str(self.run.path)),
            "notes": self.run.notes,
            "problem": self.problem,
            "standing": asdict(self.status),
            "verdict": asdict(self.verdict),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "baselineMissing": self._judge.alarm.baseline_missing,
            "allowed": self._judge.alarm.allowed,
            "summary": {name: numbers_of(points) for name, points in self.points.items()},
            "kept": self.kept,
        }


def page_content(views: Collection[RunView], version: int = 1) -> dict[str, Any]:
    """Return all that the page shows of runs: the status of each run, and the curves of each arm.

    Expected curves are shown if they are the same for all runs.
    """
    colours = colours_of([view.run for view in views])
    begun = [view for view in views if view.points]
    expected = begun[0].expected if begun and all(view.expected == begun[0].expected for view in begun) else []
    measured = {name.partition("/")[0] for view in begun for name in view.points}
    return {
        "version": version,
        "runs": as_json([view.content(colours[view.run.curve]) for view in views]),
        "curves": {name: _curves_of([view.points for view in begun if view.run.curve == name]) for name in colours},
        "expected": [_expected_content(curve) for curve in expected],
        "missing": [panel.title for panel in PANELS if panel.name not in measured] if begun else [],
    }


def _curves_of(runs: Sequence[Points]) -> Mapping[str, Any]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: as_json(band_of([run[name] for run in runs if name in run])) for name in names}


def _expected_content(curve: Run) -> dict[str, Any]:
    reward = _curves_of([points_of(curve.rows)])["reward/reward"]
    return {"name": curve.name, "path": printable(str(curve.path)), "points": reward}


def recorded_content(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the page shows of recorded runs, which must have different names."""
    views = [RunView(run, number) for number, run in enumerate(runs)]
    for view in views:
        view.look()
    return page_content(views)


class Live:
    """All runs of some paths: files and folders of runs, and folders in which runs may begin. It is thread-safe."""

    def __init__(self, paths: Sequence[Path], pause_seconds: float = 0.5) -> None:
        self.paths = [path.absolute() for path in paths]
        self._pause, self._next_look = pause_seconds, -float("inf")
        self._lock = threading.Lock()
        self._runs: dict[tuple[Path, bool], RunView] = {}  # by source, and whether a run has begun there
        self._shown: Sequence[object] = ()  # what is shown; a new version differs in it
        # Versions start from the time, so a restarted server does not take an open page's version for its own.
        self._count, self._version = 0, time.time_ns() // 1_000_000
        names_of([source for path in paths for source in sources_in(path) or [path]])  # only here a path is refused
        self._read_on()

    def views(self) -> dict[int, RunView]:
        """Return the present views of the runs by their numbers, in order."""
        return self._now()[1]

    def changes(self, version: int) -> dict[str, Any] | None:
        """Return all that the page shows, with its version; None if `version` is still the newest."""
        newest, views = self._now()
        return None if version == newest else page_content(views.values(), newest)

    def _now(self) -> tuple[int, dict[int, RunView]]:
        with self._lock:
            self._read_on()
            return self._version, {view.number: view for view in self._runs.values()}

    def _read_on(self) -> None:
        start = time.monotonic()
        if start < self._next_look:
            return
        found: dict[tuple[Path, bool], None] = {}
        for path in self.paths:
            try:
                sources = sources_in(path)
            except (ConfigurationError, OSError):  # the path is gone; its runs report it
                sources = [source for source, begun in self._runs if begun and path in (source, *source.parents)]
            found |= dict.fromkeys([(source, True) for source in sources] or [(path, False)])
        names = names_of([source for source, _ in found])
        named = zip(found, names, strict=True)
        self._runs = {key: self._look_at(*key, name, self._runs.get(key)) for key, name in named}
        shown = [(view, view.status.state, view.problem, view.kept) for view in self._runs.values()]
        self._version += shown != self._shown
        self._shown = shown
        end = time.monotonic()
        self._next_look = end + max(self._pause, 4 * (end - start) if self._pause else 0)

    def _look_at(self, source: Path, begun: bool, name: str, view: RunView | None) -> RunView:
        """Return the view of a run; read the run again if its file or its name has changed."""
        age, seen = None, list[object]([name])
        try:
            if begun:
                stat = source.stat()
                age, seen = max(0.0, time.time() - stat.st_mtime), [name, stat.st_ino, stat.st_size, stat.st_mtime_ns]
        except OSError as error:
            seen.append(error_in_one_line(error))
        if view is None or view.seen != seen:
            number = self._count if view is None else view.number
            self._count += view is None
            view = RunView(run_or_problem(source, name) if begun else Run(name, source, []), number, seen)
        view.look(age)
        return view


def _kept_folder(source: Path) -> Path:
    """Return the folder of a run's kept tokens, given its metrics file or the folder of that file."""
    if source.is_dir():
        return source / kept_file.FOLDER
    own = kept_file.beside(source)
    return own if source.suffix == ".jsonl" or own.exists() else source.with_name(kept_file.FOLDER)


def kept_in(folder: Path) -> tuple[list[KeptSummary] | None, str]:
    """Return the responses that a run has kept, None if it has kept none, and why a file cannot be read."""
    found, problem = list[KeptSummary](), ""
    try:
        files = kept_file.files_in(folder).values()
    except ConfigurationError as error:
        return [], error_in_one_line(error)
    for file in files:
        try:
            stat = file.stat()
            found += _summaries(file, stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:  # a resume has just moved it away
            pass
        except (ConfigurationError, OSError) as error:
            problem = problem or error_in_one_line(error)
    return found if files else None, problem


@functools.lru_cache(maxsize=2**15)
def _summaries(file: Path, _written: int, _size: int) -> Sequence[KeptSummary]:
    return kept_file.summaries_in(file)


def responses_content(folder: Path, step: int | None) -> dict[str, Any]:
    """Return the responses of the nearest step that has some, or of all steps; those with the most damage first."""
    kept, problem = kept_in(folder)
    found = kept or []
    if step is not None and found:
        nearest = min((abs(each.step - step), each.step) for each in found)[1]
        step, found = nearest, [each for each in found if each.step == nearest]
    shown = sorted(found, key=lambda each: (-each.damage, each.step, each.offset))[: kept_file.MOST_RESPONSES]
    return as_json({"step": step, "count": len(found), "rows": [vars(each) for each in shown], "problem": problem})


def response_content(response: KeptResponse) -> dict[str, Any]:
    """Return what the page shows of a response."""
    fields = vars(response).items()
    content = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields}
    gap = abs(response.log_probs - response.rollout_log_probs).tolist()
    return as_json(content | {"gap": gap, "words": kept_file.DECISIONS})
