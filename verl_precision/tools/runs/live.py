"""Runs as they are now: read again where their files have changed, and what has changed since somebody asked last."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.tools.runs.content import CurvesContent, RunView, curves_of, page_content
from verl_precision.tools.runs.read import Run, files_of, names_of, read_run, sources_in


class LiveRun:
    """A run that is followed, or a place where one may begin."""

    def __init__(self, number: int, source: Path, begun: bool, expected: Sequence[Run] | None) -> None:
        self.number, self._source, self._begun, self._expected = number, source, begun, expected
        self._seen: object = None
        self.view = RunView(Run(source.name, source, []), expected)

    def read_on(self, name: str) -> bool:
        """Read the run again under a name if its files, or the name, have changed; return whether anything has."""
        written: list[float] = []
        try:
            stats = [file.stat() for file in files_of(self._source)] if self._begun else []
            written = [each.st_mtime for each in stats]
            seen = [name, *((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)]
        except Exception as error:
            seen = [name, error_in_one_line(error)]
        before, changed = self._shown(), seen != self._seen
        if changed:
            self.view, self._seen = RunView(self._read(name), self._expected), seen
        self.view.look(max(0.0, time.time() - max(written)) if written else None)
        return changed or self._shown() != before

    def _read(self, name: str) -> Run:
        try:
            return read_run(self._source, name) if self._begun else Run(name, self._source, [])
        except Exception as error:
            return Run(name, self._source, [], problem=error_in_one_line(error))

    def _shown(self) -> tuple[object, ...]:
        return self.view.status.state, self.view.problem, self.view.kept


class Live:
    """All runs of some paths: files and folders of runs, and folders in which runs may begin. Any thread may ask.

    Files are looked at again after `pause_seconds`, or four times the time that it took. A path that is not there, or
    is given twice, is refused.
    """

    def __init__(
        self, paths: Sequence[Path], expected: Sequence[Run] | None = None, pause_seconds: float = 0.5
    ) -> None:
        self.paths = [path.absolute() for path in paths]
        self._expected, self._pause, self._next_look = expected, pause_seconds, -float("inf")
        self._lock = threading.Lock()
        self._runs: dict[tuple[Path, bool], LiveRun] = {}  # by source, and whether a run has begun there
        # A server that is started again must not take a page's version for its own.
        self._count, self._version = 0, time.time_ns() // 1_000_000
        self._curves: dict[str, tuple[int, CurvesContent]] = {}  # name -> version in which it has changed, and content
        names_of([source for path in paths for source in sources_in(path) or [path]])  # later, no path is refused
        self._read_on()

    def views(self) -> dict[int, RunView]:
        """Return the runs as they are now, in order, by their numbers."""
        with self._lock:
            self._read_on()
            return self._views()

    def _views(self) -> dict[int, RunView]:
        return {run.number: run.view for run in self._runs.values()}

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return all of the runs, and the curves that have changed since a version; None where nothing has."""
        with self._lock:
            self._read_on()
            if since == self._version:
                return None
            since = since if 0 < since < self._version else 0
            curves = {name: found for name, (version, found) in self._curves.items() if version > since}
            return page_content(self._views(), curves, self._version)

    def _read_on(self) -> None:
        start = time.monotonic()
        if start < self._next_look:
            return
        found: dict[tuple[Path, bool], None] = {}
        for path in self.paths:
            try:
                sources = sources_in(path)
            except (ConfigurationError, OSError):  # it has gone, which its runs say
                sources = [source for source, begun in self._runs if begun and path in (source, *source.parents)]
            found |= dict.fromkeys([(source, True) for source in sources] or [(path, False)])
        changed = {run.view.run.curve for key, run in self._runs.items() if key not in found}
        for key in found:
            if key not in self._runs:
                self._runs[key] = LiveRun(self._count, *key, self._expected)
                self._count += 1
        self._runs = {key: self._runs[key] for key in found}
        for run, name in zip(self._runs.values(), names_of([source for source, _ in found]), strict=True):
            former = run.view.run.curve
            if run.read_on(name):
                changed |= {former, run.view.run.curve}
        self._version += bool(changed)
        for name in changed:
            self._curves.pop(name, None)
            if own := [view.points for view in self._views().values() if view.run.curve == name]:
                self._curves[name] = self._version, curves_of(own)
        end = time.monotonic()
        self._next_look = end + max(self._pause, 4 * (end - start) if self._pause else 0)
