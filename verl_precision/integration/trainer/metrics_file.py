"""One metrics file for all starts of a run.

verl empties the file of `trainer.logger=[file]` at each start. Under the trainers of `trainers.py` it is one series:
rows up to the checkpoint stay, and rows of later steps, which are repeated, move to `<file>.superseded`.
"""

import json
import math
import os
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from verl_precision.base.files import write_file
from verl_precision.integration.ledger import set_within, wrapping

# The step of the checkpoint that the run resumes from; None: verl's own behaviour. verl opens the file deep in `fit`.
_resumed_at: ContextVar[int | None] = ContextVar("resumed_at", default=None)


def series_goes_on(step: int) -> AbstractContextManager[None]:
    """Return a context in which an opened metrics file keeps its rows up to the checkpoint's step (0: none)."""
    return set_within(_resumed_at, step)


@wrapping("FileLogger.__init__")
def keep_metrics(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Open verl's metrics file; outside `series_goes_on` as verl does."""
    step = _resumed_at.get()
    if step is None:
        wrapped(*args, **kwargs)
        return
    path = metrics_path(*args, **kwargs)
    pending = _beside(path, "pending")
    rows = _rows(path)
    logged = {number for number, _ in rows}
    rows += [row for row in _rows(pending) if row[0] not in logged]
    kept = b"".join(line for number, line in sorted(rows, key=lambda row: row[0]) if number <= step)
    superseded = b"".join(line for number, line in rows if number > step)
    if superseded:
        with _beside(path, "superseded").open("ab") as file:
            file.write(superseded)
    if kept:
        write_file(pending, kept, replace=True)  # verl empties the file, and the start may be killed then
    wrapped(*args, **kwargs)
    instance.fp.write(kept)
    pending.unlink(missing_ok=True)


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """Return the file that verl's logger will open."""
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    return Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / project_name / f"{experiment_name}.jsonl"


def _rows(path: Path) -> list[tuple[float, bytes]]:
    """Return step and line of each row; a broken line, as a killed run may leave it, has the step infinity."""
    return [(_step(line), line + b"\n") for line in (path.read_bytes().splitlines() if path.exists() else [])]


def _step(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) or isinstance(step, float) and step == step else math.inf


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")
