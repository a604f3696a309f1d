"""The metrics of a run, from its files: verl's metrics file, a console log, or TensorBoard events.

`read_runs` reads all there is, a `Follower` goes on where it stopped.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl_precision.base.errors import VerlPrecisionError
from verl_precision.base.files import open_regular
from verl_precision.base.terminal import printable
from verl_precision.tools.runs.rows import LONGEST_LINE, event_rows, has_steps, is_whole, log_rows, metric_rows, refused
from verl_precision.tools.runs.rows import Rows as Rows

REWARD = "critic/score/mean"
_SEED = re.compile(r"(.+)/seed_\d+")
_TOGETHER, _BLOCK = 500, 2**22  # lines, or bytes of them, that are parsed at once
_TAIL = 512  # bytes before the place where a file was left, which say whether it is still the same
OnProgress = Callable[[Path, int, int], None]  # what is read, bytes of it that have been, bytes in all


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
    problem: str = ""  # why it cannot be read, in words

    @property
    def curve(self) -> str:
        """Return the name of its curve in a figure."""
        return self.arm or self.name


def read_runs(paths: list[Path], on_progress: OnProgress | None = None) -> list[Run]:
    """Read runs. A folder that `verl-precision compare` writes, of runs or of arms with seeds, stands for each of them.

    Where a run's name is `<arm>/seed_<n>`, it is one of its arm. One that cannot be read has its problem in place of
    rows. A path that is not there, or is given twice, is refused, and so is the first run where none can be read.
    """
    of_path = {path: sources_in(path) for path in paths}
    if empty := [path for path, sources in of_path.items() if not sources]:
        raise refused(empty[0], "there are no metrics in it", "Name the file itself.")
    sources = [source for path in paths for source in of_path[path]]
    runs: list[Run] = []
    faults: list[VerlPrecisionError | OSError] = []
    for source, name in zip(sources, names_of(sources), strict=True):
        follower = Follower(source, on_progress)
        try:
            follower.read_on()
            if not follower.rows:
                raise refused(source, "there is no training step in it", "Wait for the first step of the run.")
            runs.append(follower.run(name))
        except (VerlPrecisionError, OSError) as error:
            runs.append(follower.run(name, str(error)))
            faults.append(error)
    if len(faults) == len(runs):
        raise faults[0]
    return runs


def read_metrics(path: Path) -> Rows:
    """Return the rows of a file of verl's file logger, as they stand there."""
    with open_regular(path) as file:
        return metric_rows(path, file.readlines())


class Follower:
    """A run's metrics, in the order of steps, which go on where they were left.

    A row whose line has no end yet is left until it has. Of a step that is there twice, the later row counts (a resumed
    run). A file that shrinks, or has other bytes where it was read, is read anew.
    """

    def __init__(self, source: Path, on_progress: OnProgress | None = None) -> None:
        self.source = source  # a file, or a folder of TensorBoard events
        self.written = 0.0  # when the newest row was, in seconds since 1970
        self._on_progress = on_progress or (lambda path, done, size: None)
        self._events = os.path.isdir(source) or "tfevents" in source.name
        self._log = source.suffix != ".jsonl"
        self._seen: object = None
        self._fault: Exception | None = None
        self._clear()

    def _clear(self) -> None:
        self.rows: Rows = []
        self._read, self._lines, self._tail, self._cut = 0, 0, b"", False
        self._repeated = self._unreadable = 0

    def run(self, name: str, problem: str = "") -> Run:
        """Return what has been read. Where the name is `<arm>/seed_<n>`, the run is one of its arm."""
        notes = [f"{self._unreadable} value(s) of the log are not numbers and are left out"] * bool(self._unreadable)
        if self._repeated:
            notes.append(f"{self._repeated} step(s) were logged more than once (a resumed run): the last counts")
        if self._cut:
            notes.append("the last row is cut short and is left out")
        of_seed = _SEED.fullmatch(name)
        return Run(name, self.source, self.rows, tuple(notes), of_seed.group(1) if of_seed else "", problem=problem)

    def read_on(self) -> int | None:
        """Read what is new; return the place of the first row that has changed, or None where nothing has.

        Raises:
            VerlPrecisionError: If a whole line is no row, or the source cannot be read: until it is another one. What
                was read is forgotten.
            OSError: If the source is not there.
        """
        seen, self._seen, before = self._seen, None, len(self.rows)
        try:
            files = _event_files(self.source) if self.source.is_dir() else [self.source]
            stats = [file.stat() for file in files]
            self._seen = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
            if self._seen == seen:
                if self._fault is not None:
                    raise self._fault.with_traceback(None)
                return None
            self.written, self._fault = max((each.st_mtime for each in stats), default=0.0), None
            rows, anew = (event_rows(self.source, files), True) if self._events else self._new_rows()
        except Exception as error:
            self._clear()
            self._fault = error
            raise
        if self._events:
            self._clear()
        first = min(map(self._put, rows), default=None)
        return 0 if anew and (before or rows) else first

    def _new_rows(self) -> tuple[Rows, bool]:
        """Return the rows behind what was read, and whether all was read anew."""
        rows: Rows = []
        with open_regular(self.source) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self._read - len(self._tail))
            anew = file.read(len(self._tail)) != self._tail
            if anew:
                self._clear()
                file.seek(0)
            self._cut = False
            for lines in self._whole_lines(file, size):
                if self._log:
                    found, unreadable = log_rows(line.decode(errors="replace") for line in lines)
                    self._unreadable += unreadable
                else:
                    found = metric_rows(self.source, lines, self._lines)
                rows += found
                self._lines += len(lines) - (not lines[-1].endswith(b"\n"))
                self._read += sum(map(len, lines))
                self._on_progress(self.source, self._read, size)
            file.seek(max(0, self._read - _TAIL))
            self._tail = file.read(self._read - file.tell())
        return rows, anew

    def _whole_lines(self, file: BinaryIO, size: int) -> Iterator[list[bytes]]:
        """Yield the lines up to a size, some at a time; a last one without an end only where it is a whole row."""
        some: list[bytes] = []
        left, weight = size - self._read, 0
        while line := file.readline(min(LONGEST_LINE + 1, left)):
            if len(line) > LONGEST_LINE:
                number = self._lines + len(some) + 1
                raise refused(self.source, f"line {number} has more than {LONGEST_LINE} bytes", "Shorten it.")
            self._cut = not line.endswith(b"\n") and (self._log or not is_whole(line))
            if self._cut:
                break
            some.append(line)
            left, weight = left - len(line), weight + len(line)
            if len(some) == _TOGETHER or weight > _BLOCK:
                yield some
                some, weight = [], 0
        if some:
            yield some

    def _put(self, row: dict[str, float]) -> int:
        """Put a row in its place, which is returned."""
        end = not self.rows or row["step"] > self.rows[-1]["step"]
        place = len(self.rows) if end else bisect_left(self.rows, row["step"], key=lambda each: each["step"])
        if not end and self.rows[place]["step"] == row["step"]:
            self.rows[place] = self.rows[place] | row
            self._repeated += 1
        else:
            self.rows.insert(place, row)
        return place


def sources_in(path: Path) -> list[Path]:
    """Return the files, or folders of TensorBoard events, that a path stands for; none where no run has begun.

    A folder of which it cannot be said what to read stands for itself, and its `Follower` says why.
    """
    if not os.path.exists(path):
        raise refused(path, "there is no such file or folder", "Check the path.")
    if not os.path.isdir(path):
        return [path]
    folders, found, unclear = [path], list[Path](), list[Path]()
    for _ in range(3):  # a run; runs or arms of a comparison; seeds of its arms
        below: list[Path] = []
        for folder in folders:
            try:
                below += (inside := sorted(folder.iterdir()))
                found += _source_of(folder, inside)
            except (VerlPrecisionError, OSError):
                unclear.append(folder)
        if found:
            break
        folders = list(filter(os.path.isdir, below))
    return found + unclear


def _source_of(folder: Path, inside: Sequence[Path]) -> list[Path]:
    """Return what to read in a folder, at most one: a metrics file, else events (itself), else a log with steps."""
    found = [each for each in inside if each.suffix == ".jsonl"]
    found = list(filter(Path.is_file, found)) or found
    if not found and any("tfevents" in each.name and not each.is_dir() for each in inside):
        return [folder]
    found = found or [each for each in inside if each.suffix == ".log" and each.is_file() and has_steps(each)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise refused(folder, f"several files could be meant: {names}", "Name the file itself.", "one of them")
    return found


def _event_files(folder: Path) -> list[Path]:
    inside = sorted(folder.iterdir())
    found = [each for each in inside if "tfevents" in each.name and not each.is_dir()]
    if not found:
        _source_of(folder, inside)  # says where several files could be meant
        raise refused(folder, "it is a folder, in which there are no metrics", "Move it away.")
    return found


def names_of(sources: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; a metrics file is known by its folder."""
    if len({source.absolute() for source in sources}) < len(sources):
        raise refused(sources[0], "it is given twice", "Leave one out.", "each run once")
    parts = [(s.parent if s.name == "metrics.jsonl" else s).absolute().parts for s in sources]
    parts = [tuple(map(printable, part)) for part in parts]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(source)) for source in sources]
