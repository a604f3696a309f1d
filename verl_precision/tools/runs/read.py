"""The metrics of a run, from its files: verl's metrics file, a console log, or TensorBoard events.

`read_runs` reads all there is, a `Follower` goes on where it stopped.
"""

import importlib.util
import json
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError

REWARD = "critic/score/mean"
READABLE = (
    "verl's metrics file (.jsonl, trainer.logger=[file]), a console log with lines `step:N - key:value`, TensorBoard "
    "events, or a folder with one of them, of such folders, or of arms that have one for each seed"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
_SEED = re.compile(r"(.+)/seed_\d+")
_TOGETHER = 500  # lines that are parsed at once
_TAIL = 512  # bytes before the place where a file was left, which say whether it is still the same
Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """The metrics of a run."""

    name: str  # name in legend and table
    path: Path  # the file or folder that was read
    rows: Rows  # one dictionary a step, in order: `step`, and numbers by key. A NaN that was logged is NaN
    notes: tuple[str, ...] = ()  # what was left out, in words
    arm: str = ""  # runs of one arm (its seeds) are one curve with this name; empty: the run has a curve of its own
    # In a comparison of estimators, the one whose plots show the run; empty where all runs share plots.
    column: str = ""

    @property
    def curve(self) -> str:
        """Return the name of its curve in a figure."""
        return self.arm or self.name


def read_runs(paths: list[Path]) -> list[Run]:
    """Read runs. A folder that `verl-precision compare` writes, of runs or of arms with seeds, stands for each of them.

    Where a run's name is `<arm>/seed_<n>`, it is one of its arm. A path that cannot be read, or is given twice, is
    refused.
    """
    sources = [source for path in paths for source in sources_in(path) or _without_metrics(path)]
    followers = [Follower(source) for source in sources]
    for follower in followers:
        follower.read_on()
        if not follower.rows:
            raise _refused(follower.source, "there is no training step in it", "Wait for the first step of the run.")
    return [each.run(name) for each, name in zip(followers, names_of(sources), strict=True)]


class Follower:
    """A run's metrics, in the order of steps, which go on where they were left.

    A row whose line has no end yet is left until it has. Of a step that is there twice, the later row counts (a resumed
    run). A file that shrinks, or has other bytes where it was read, is read anew.
    """

    def __init__(self, source: Path) -> None:
        self.source = source  # a file, or a folder of TensorBoard events
        self.written = 0.0  # when the newest row was, in seconds since 1970
        self._events = source.is_dir() or "tfevents" in source.name
        self._seen: object = None
        self._clear()

    def _clear(self) -> None:
        self.rows: Rows = []
        self._read, self._tail, self._cut = 0, b"", False
        self._repeated = self._unreadable = 0

    def run(self, name: str) -> Run:
        """Return what has been read. Where the name is `<arm>/seed_<n>`, the run is one of its arm."""
        notes = [f"{self._unreadable} value(s) of the log are not numbers and are left out"] * bool(self._unreadable)
        if self._repeated:
            notes.append(f"{self._repeated} step(s) were logged more than once (a resumed run): the last counts")
        if self._cut:
            notes.append("the last row is cut short and is left out")
        of_seed = _SEED.fullmatch(name)
        return Run(name, self.source, self.rows, tuple(notes), of_seed.group(1) if of_seed else "")

    def read_on(self) -> int | None:
        """Read what is new; return the place of the first row that has changed, or None where nothing has.

        Raises:
            ConfigurationError: If a whole line is no row. What was read is forgotten.
            OSError: If the source cannot be read.
        """
        files = sorted(self.source.glob("*tfevents*")) if self.source.is_dir() else [self.source]
        stats = [file.stat() for file in files]
        stamp = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
        if stamp == self._seen:
            return None
        self._seen, self.written = stamp, max((each.st_mtime for each in stats), default=0.0)
        before = len(self.rows)
        try:
            rows, anew = (_event_rows(self.source), True) if self._events else self._new_rows()
        except ConfigurationError:
            self._clear()
            raise
        if self._events:
            self._clear()
        first = min(map(self._put, rows), default=None)
        return 0 if anew and (before or rows) else first

    def _new_rows(self) -> tuple[Rows, bool]:
        """Return the rows behind what was read, and whether all was read anew."""
        with self.source.open("rb") as file:
            file.seek(self._read - len(self._tail))
            anew = file.read(len(self._tail)) != self._tail
            if anew:
                self._clear()
                file.seek(0)
            data = file.read()
        *lines, rest = data.split(b"\n")
        log = self.source.suffix != ".jsonl"
        if rest and not log and _is_whole(rest):
            lines, rest = [*lines, rest], b""
        self._cut = bool(rest)
        read = data[: len(data) - len(rest)]
        self._read, self._tail = self._read + len(read), (self._tail + read)[-_TAIL:]
        if not log:
            return _metric_rows(self.source, lines), anew
        rows, unreadable = _log_rows(line.decode(errors="replace") for line in lines)
        self._unreadable += unreadable
        return rows, anew

    def _put(self, row: dict[str, float]) -> int:
        """Put a row in its place, which is returned."""
        if not self.rows or row["step"] > self.rows[-1]["step"]:
            self.rows.append(row)
            return len(self.rows) - 1
        place = bisect_left(self.rows, row["step"], key=lambda each: each["step"])
        if self.rows[place]["step"] == row["step"]:
            self.rows[place] = self.rows[place] | row
            self._repeated += 1
        else:
            self.rows.insert(place, row)
        return place


def read_metrics(path: Path) -> Rows:
    """Return the metrics of each step that are numbers, from a file of verl's file logger, which writes NaN as null."""
    return _metric_rows(path, path.read_bytes().splitlines())


def _metric_rows(path: Path, lines: Iterable[bytes]) -> Rows:
    rows: Rows = []
    whole = list(filter(None, lines))
    try:
        for start in range(0, len(whole), _TOGETHER):
            some = whole[start : start + _TOGETHER]
            parsed = json.loads(b"[" + b",".join(some) + b"]")  # together, all rows have the same keys in memory
            if len(parsed) != len(some):
                raise ValueError("a line with several rows")
            rows += map(_metric_row, parsed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"it is not a metrics file of verl's file logger ({error!r})"
        remedy = "If the run was killed while it wrote a line, remove that line."
        raise _refused(path, problem, remedy, "one JSON object a line, with `step` and `data`") from error
    return rows


def _metric_row(row: Any) -> dict[str, float]:
    if not isinstance(row["step"], int | float):
        raise TypeError("step is no number")
    found = {"step": row["step"]}
    for key, value in row["data"].items():
        if type(value) is float:
            found[key] = value
        elif value is None or isinstance(value, int):
            found[key] = math.nan if value is None else float(value)
    return found


def _is_whole(line: bytes) -> bool:
    """Return whether a last line without an end is a JSON object all the same."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _refused(path: Path, problem: str, remedy: str, allowed: str = READABLE) -> ConfigurationError:
    return ConfigurationError(problem, setting="RUN", value=str(path), allowed=allowed, remedy=remedy)


def sources_in(path: Path) -> list[Path]:
    """Return the files, or folders of TensorBoard events, that a path stands for; none where no run has begun."""
    if not path.exists():
        raise _refused(path, "there is no such file or folder", "Check the path.")
    if path.is_file():
        return [path]
    folders = [path]
    for _ in range(3):  # a run; runs or arms of a comparison; seeds of its arms
        if found := [source for folder in folders if (source := _source_in(folder))]:
            return found
        folders = [below for folder in folders for below in sorted(folder.iterdir()) if below.is_dir()]
    return []


def _without_metrics(path: Path) -> NoReturn:
    raise _refused(path, "there are no metrics in it", "Name the file itself.")


def _source_in(folder: Path) -> Path | None:
    """Return what to read in a folder: a metrics file, else events (the folder itself), else a log that has steps."""
    found = sorted(folder.glob("*.jsonl"))
    if not found and any(folder.glob("*tfevents*")):
        return folder
    found = found or [log for log in sorted(folder.glob("*.log")) if _has_steps(log)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise _refused(folder, f"several files could be meant: {names}", "Name the file itself.", "one of them")
    return found[0] if found else None


def names_of(sources: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; a metrics file is known by its folder."""
    parts = [(s.parent if s.name == "metrics.jsonl" else s).absolute().parts for s in sources]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    if sources:
        raise _refused(sources[0], "it is given twice", "Leave one out.", "each run once")
    return []


def _has_steps(log: Path) -> bool:
    with log.open(errors="replace") as lines:
        return any(_STEP.search(_COLOUR.sub("", line)) for line in lines)


def _log_rows(lines: Iterable[str]) -> tuple[Rows, int]:
    """Read `step:3 - critic/score/mean:-32.8 - ...`, coloured and prefixed by Ray or not; count what is no number."""
    rows, unreadable = [], 0
    for found in filter(None, (_STEP.search(_COLOUR.sub("", line)) for line in lines)):
        row: dict[str, float] = {"step": int(found.group(1))}
        for pair in found.group(2).strip().split(" - "):
            key, _, text = pair.rpartition(":")
            text = _NUMPY.sub(r"\1", text) if key else "no number"
            try:
                row[sys.intern(key)] = float({"True": "1", "False": "0"}.get(text, text))
            except ValueError:
                unreadable += 1
        rows.append(row)
    return rows, unreadable


def _event_rows(path: Path) -> Rows:
    if importlib.util.find_spec("tensorboard") is None:
        problem = "these are TensorBoard events, and tensorboard is not installed"
        allowed = "a .jsonl metrics file or a console log, which need no other package"
        remedy = "pip install tensorboard"
        raise EnvironmentMismatchError(problem, setting="RUN", value=str(path), allowed=allowed, remedy=remedy)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            rows.setdefault(event.step, {"step": event.step})[key] = event.value
    return list(rows.values())
