"""The metrics of a run, from its file: verl's metrics file or a console log."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError, error_in_one_line
from verl_precision.base.files import open_regular
from verl_precision.base.terminal import printable
from verl_precision.mismatch import metric_names as names

REWARD = names.REWARD
READABLE = (
    "verl's metrics file (.jsonl, trainer.logger=[file]), a console log with lines `step:N - key:value`, a folder with "
    "such files, or a folder of such folders, up to five deep"
)
LONGEST_LINE = 2**24  # bytes
DEEPEST = 5  # folders below a path in which runs are found
LARGEST_STEP = 2**53  # JSON's largest whole number
_CUT = "the last row is incomplete and is left out"
_SEED = re.compile(r"(.+)/seed_\d+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d{1,15}) - (.+)")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """The metrics of a run."""

    name: str  # name in legend and table
    path: Path  # the file or folder that was read
    rows: Rows  # one dictionary a step, in order: `step`, and numbers by key. A logged NaN stays NaN
    notes: tuple[str, ...] = ()  # what was left out, in words
    problem: str = ""  # why it cannot be read, in words

    @property
    def curve(self) -> str:
        """Return the name of its curve in a figure: runs `<arm>/seed_<n>` of one arm are one curve."""
        return of_seed[1] if (of_seed := _SEED.fullmatch(self.name)) else self.name


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs, also from a folder of runs or arms; a run that cannot be read has a `problem` in place of rows.

    Refuse a path that does not exist or is given twice. If no run can be read, refuse the first run.
    """
    of_path = {path: sources_in(path) for path in paths}
    if empty := [path for path, sources in of_path.items() if not sources]:
        raise refused(empty[0], "there are no metrics in it", "Name one of the files.")
    sources = [source for path in paths for source in of_path[path]]
    runs = [run_or_problem(source, name) for source, name in zip(sources, names_of(sources), strict=True)]
    begin = "there is no training step in it. Wait for the first step of the run."
    runs = [run if run.rows or run.problem else replace(run, problem=f"{run.path}: {begin}") for run in runs]
    if all(run.problem for run in runs):
        raise ConfigurationError(runs[0].problem)
    return runs


def run_or_problem(source: Path, name: str) -> Run:
    """Return a run; if it cannot be read, it has a `problem` in place of rows."""
    try:
        return _read_run(source, name)
    except Exception as error:
        return Run(name, source, [], problem=error_in_one_line(error))


def _read_run(source: Path, name: str) -> Run:
    """Read a run from its file.

    A row is left out if its line is incomplete. If a step has two rows (a resumed run), the later row counts.
    """
    notes = list[str]()
    with open_regular(source) as file:
        read = _rows_of_metrics if source.suffix == ".jsonl" else _rows_of_log
        found = list(read(source, file, notes))
    of_step: dict[float, dict[str, float]] = {}
    for row in found:
        of_step[row["step"]] = of_step.get(row["step"], {}) | row
    if repeated := len(found) - len(of_step):
        notes.append(f"{repeated} step(s) were logged more than once (by a resumed run); the last row of each counts")
    return Run(name, source, [of_step[step] for step in sorted(of_step)], tuple(notes))


def read_metrics(path: Path) -> Rows:
    """Return the rows of a file of verl's file logger, unchanged and in the order of the file."""
    with open_regular(path) as file:
        return list(_rows_of_metrics(path, file, []))


def _lines(source: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise refused(source, f"line {number} has more than {LONGEST_LINE} bytes", "Shorten it.")
        yield number, line


def _rows_of_metrics(path: Path, file: BinaryIO, notes: list[str]) -> Iterator[dict[str, float]]:
    """Yield the numbers of each step of verl's file logger, which writes NaN as null."""
    for number, line in _lines(path, file):
        try:
            if line.strip():
                yield _metric_row(json.loads(line))
        except Exception as error:  # also for deep brackets and huge numbers
            if not line.endswith(b"\n"):
                notes.append(_CUT)
                return
            problem = f"it is not a metrics file of verl's file logger (line {number}: {error!r:.300})"
            remedy = "If the run was killed while it wrote the line, remove that line."
            raise refused(path, problem, remedy, "one JSON object a line, with `step` and `data`") from error


def _metric_row(row: Any) -> dict[str, float]:
    step, found = step_of(row["step"]), dict[str, float]()
    for key, value in row["data"].items():
        if value is None or isinstance(value, int | float):
            found[sys.intern(key)] = math.nan if value is None else float(value)
    return found | {"step": step}  # even if the data have a key `step`


def step_of(value: object) -> float:
    """Return a step; refuse values of other types, NaN, and numbers above JSON's largest whole number."""
    if not isinstance(value, int | float) or not abs(value) < LARGEST_STEP:
        raise TypeError("step is not a step number")
    return value


def _rows_of_log(path: Path, file: BinaryIO, notes: list[str]) -> Iterator[dict[str, float]]:
    """Yield the numbers of each `step:3 - critic/score/mean:-32.8 - ...`, with or without Ray's prefix and colours."""
    unreadable = 0
    for _, line in _lines(path, file):
        found = b"step:" in line and _STEP.search(_COLOUR.sub("", line.decode(errors="replace")))
        if found and not line.endswith(b"\n"):
            notes.append(_CUT)
        elif found:
            row: dict[str, float] = {}
            for key, _, text in (pair.rpartition(":") for pair in found[2].strip().split(" - ")):
                text = _NUMPY.sub(r"\1", text) if key else "no number"
                try:
                    row[sys.intern(key)] = float({"True": "1", "False": "0"}.get(text, text))
                except ValueError:
                    unreadable += 1
            yield row | {"step": int(found[1])}
    if unreadable:
        notes.append(f"{unreadable} value(s) of the log are not numbers and are left out")


def refused(path: Path, problem: str, remedy: str, allowed: str = READABLE) -> ConfigurationError:
    """Return the error that refuses a run."""
    return ConfigurationError(problem, setting="FOLDER", value=str(path), allowed=allowed, remedy=remedy)


def sources_in(path: Path) -> list[Path]:
    """Return the files to read for a path; none if no run has begun there."""
    if not os.path.exists(path):
        raise refused(path, "there is no such file or folder", "Check the path.")
    if not os.path.isdir(path):
        return [path]
    found, seen = list[Path](), set[str]()
    for at, folders, _ in os.walk(path, followlinks=True):
        known, seen = len(seen), seen | {os.path.realpath(at)}
        inside = _sources_of(Path(at)) if len(seen) > known else []
        ends = inside or len(seen) == known or len(Path(at).relative_to(path).parts) == DEEPEST
        found, folders[:] = found + inside, [] if ends else sorted(folders)
    return found


def _sources_of(folder: Path) -> list[Path]:
    """Return the files to read in a folder: metrics files or, if there are none, logs with steps."""
    inside = sorted(folder.glob("*"))
    found = [each for each in inside if each.suffix == ".jsonl"]
    found = list(filter(_is_series, filter(Path.is_file, found))) or [each for each in found if not each.is_file()]
    return found or [each for each in inside if each.suffix == ".log" and each.is_file() and _has_steps(each)]


def _is_series(path: Path) -> bool:
    """Return whether a file is a run's metrics, or a damaged file of them; prompts and journals are not."""
    try:
        with open_regular(path) as file:
            first = json.loads(file.readline(LONGEST_LINE))
    except Exception:  # its reader will report the error
        return True
    return not isinstance(first, dict) or path.name == "metrics.jsonl" or bool({"step", "data"} & first.keys())


def _has_steps(log: Path) -> bool:
    try:
        with open_regular(log) as file:
            return next(_rows_of_log(log, file, []), None) is not None
    except (VerlPrecisionError, OSError):
        return True  # its reader will report the error


def names_of(sources: Sequence[Path]) -> list[str]:
    """Return a name for each path: the shortest ends that differ; metrics.jsonl takes the name of its folder."""
    if len({source.absolute() for source in sources}) < len(sources):
        raise refused(sources[0], "it is given twice", "Leave one out.", "each run once")
    parts = [(s.parent if s.name == "metrics.jsonl" else s).absolute().parts for s in sources]
    parts = [tuple(map(printable, part)) for part in parts]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(source)) for source in sources]
