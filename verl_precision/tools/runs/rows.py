"""The rows of a run, from its metrics file, a console log, or TensorBoard events; else the line that is at fault."""

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.base.files import naming_file, open_regular

READABLE = (
    "verl's metrics file (.jsonl, trainer.logger=[file]), a console log with lines `step:N - key:value`, TensorBoard "
    "events, or a folder with one of them, of such folders, or of arms that have one for each seed"
)
LONGEST_LINE = 2**24  # bytes
LARGEST_STEP = 2**53  # JSON's largest whole number
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d{1,15}) - (.+)")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
Rows = list[dict[str, float]]


def refused(path: Path, problem: str, remedy: str, allowed: str = READABLE) -> ConfigurationError:
    """Return why a run is refused."""
    return ConfigurationError(problem, setting="RUN", value=str(path), allowed=allowed, remedy=remedy)


def metric_rows(path: Path, lines: Sequence[bytes], before: int = 0) -> Rows:
    """Return the numbers of each step from lines of verl's file logger, which writes NaN as null.

    So many lines are before them in the file.
    """
    whole = list(filter(bytes.strip, lines))
    try:
        parsed = json.loads(b"[" + b",".join(whole) + b"]")  # together, all rows have the same keys in memory
        if len(parsed) == len(whole):
            return [*map(_metric_row, parsed)]
    except Exception:
        whole = []  # one of them is at fault
    return [_row_of(path, number, line) for number, line in enumerate(lines, before + 1) if line.strip()]


def _row_of(path: Path, number: int, line: bytes) -> dict[str, float]:
    try:
        return _metric_row(json.loads(line))
    except Exception as error:
        problem = f"it is not a metrics file of verl's file logger (line {number}: {error!r:.300})"
        remedy = "If the run was killed while it wrote the line, remove that line."
        raise refused(path, problem, remedy, "one JSON object a line, with `step` and `data`") from error


def _metric_row(row: Any) -> dict[str, float]:
    step = step_of(row["step"])
    found = {"step": step}
    for key, value in row["data"].items():
        if type(value) is float:
            found[key] = value
        elif value is None or isinstance(value, int):
            found[key] = math.nan if value is None else float(value)
    found["step"] = step  # whatever is among the data
    return found


def step_of(value: Any) -> float:
    """Return a step; refuse another kind of value, NaN, and numbers beyond the whole ones of JSON."""
    if not isinstance(value, int | float) or not abs(value) < LARGEST_STEP:
        raise TypeError("step is no number that counts steps")
    return value


def is_whole(line: bytes) -> bool:
    """Return whether a last line without an end is a JSON object all the same."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def has_steps(log: Path) -> bool:
    """Return whether a console log has a step."""
    with open_regular(log) as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        return any(b"step:" in line and _STEP.search(_COLOUR.sub("", line.decode(errors="replace"))) for line in lines)


def log_rows(lines: Iterable[str]) -> tuple[Rows, int]:
    """Read `step:3 - critic/score/mean:-32.8 - ...`, coloured and prefixed by Ray or not; count what is no number."""
    rows, unreadable = [], 0
    for found in filter(None, (_STEP.search(_COLOUR.sub("", line)) for line in lines)):
        step = int(found.group(1))
        row: dict[str, float] = {"step": step}
        for pair in found.group(2).strip().split(" - "):
            key, _, text = pair.rpartition(":")
            text = _NUMPY.sub(r"\1", text) if key else "no number"
            try:
                row[sys.intern(key)] = float({"True": "1", "False": "0"}.get(text, text))
            except ValueError:
                unreadable += 1
        row["step"] = step
        rows.append(row)
    return rows, unreadable


def event_rows(path: Path, files: Sequence[Path]) -> Rows:
    """Return the scalars of TensorBoard events, of a file or a folder with these files."""
    if importlib.util.find_spec("tensorboard") is None:
        problem = "these are TensorBoard events, and tensorboard is not installed"
        allowed = "a .jsonl metrics file or a console log, which need no other package"
        remedy = "pip install tensorboard"
        raise EnvironmentMismatchError(problem, setting="RUN", value=str(path), allowed=allowed, remedy=remedy)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in files:
        with open_regular(file):
            pass  # TensorBoard would wait for a FIFO
    rows: dict[int, dict[str, float]] = {}
    with naming_file(path):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for key in events.Tags()["scalars"]:
            for event in events.Scalars(key):
                rows.setdefault(event.step, {"step": event.step})[key] = event.value
    return list(rows.values())
