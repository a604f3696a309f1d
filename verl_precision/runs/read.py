"""What a run measured, from whatever it left: verl's metrics file, a console log, or TensorBoard events."""

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import ConfigurationError, EnvironmentMismatchError

METRICS = "*.jsonl"
EVENTS = "*tfevents*"
LOGS = "*.log"
ALLOWED = (
    "Allowed: verl's metrics file (.jsonl, trainer.logger=[file]), a console log with lines `step:N - key:value`, "
    "TensorBoard events, or a folder with one of them or of such folders."
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(r"\bstep:(\d+) - (.+)")
NUMPY = re.compile(r"^np\.\w+\((.*)\)$")


@dataclass(frozen=True)
class Run:
    """The metrics of a run.

    Attributes:
        name: shown in legend and table.
        path: the file or folder they come from.
        rows: one a step, in order: `step` and numbers by key; a NaN that was logged is NaN.
        notes: what had to be left out, in words.
    """

    name: str
    path: Path
    rows: list[dict[str, float]]
    notes: tuple[str, ...] = ()


def read_runs(paths: list[Path]) -> list[Run]:
    """Read runs; a folder of runs (what `verl-precision compare` writes) is each of them.

    Raises:
        ConfigurationError: naming the path, what is allowed and what to do.
    """
    sources = [source for path in paths for source in _sources(path)]
    return [_read(source, name) for source, name in zip(sources, _names(sources), strict=True)]


def _sources(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigurationError(f"RUN {path}: no such file or folder. {ALLOWED} Check the path.")
    if path.is_file():
        return [path]
    own = _in_folder(path)
    if own is not None:
        return [own]
    found = [source for folder in sorted(path.iterdir()) if folder.is_dir() and (source := _in_folder(folder))]
    if not found:
        raise ConfigurationError(f"RUN {path}: no metrics in it. {ALLOWED} Name the file itself.")
    return found


def _in_folder(folder: Path) -> Path | None:
    """Return what to read: a metrics file before events (the folder itself) before a log that has steps."""
    metrics = sorted(folder.glob(METRICS))
    logs = [] if metrics else [log for log in sorted(folder.glob(LOGS)) if _log_rows(log)[0]]
    for files in (metrics, logs):
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ConfigurationError(f"RUN {folder}: several files could be meant: {names}. Allowed: one. Name it.")
    if not metrics and any(folder.glob(EVENTS)):
        return folder
    return next(iter(metrics or logs), None)


def _names(sources: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; a metrics file is known by its folder."""
    parts = [(s.parent if s.suffix == ".jsonl" and s.stem == "metrics" else s).absolute().parts for s in sources]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigurationError(f"RUN {sources[0]}: given twice. Allowed: each run once. Leave one out.")


def _read(source: Path, name: str) -> Run:
    notes: list[str] = []
    if source.is_dir() or "tfevents" in source.name:
        rows = _event_rows(source)
    elif source.suffix == ".jsonl":
        rows = _metrics_rows(source)
    else:
        rows, notes = _log_rows(source)
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"]), {}).update(row)
    if not by_step:
        raise ConfigurationError(f"RUN {source}: no training step in it. {ALLOWED} Wait for the run's first step.")
    if len(by_step) < len(rows):
        notes.append(f"{len(rows) - len(by_step)} step(s) were logged more than once (a resumed run): the last counts")
    return Run(name, source, [by_step[step] for step in sorted(by_step)], tuple(notes))


def _metrics_rows(path: Path) -> list[dict[str, float]]:
    """Read what is a number; the file logger writes NaN as null."""
    try:
        read = [{"step": row["step"], **row["data"]} for row in map(json.loads, path.read_text().splitlines())]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"RUN {path}: not a metrics file of verl's file logger ({error!r}). Allowed: one JSON object a line with "
            "`step` and `data`. Remove the line if the run was killed while writing it."
        ) from error
    return [
        {k: math.nan if v is None else float(v) for k, v in row.items() if v is None or isinstance(v, int | float)}
        for row in read
    ]


def _log_rows(path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Read a console log: `step:3 - critic/score/mean:-32.8 - ...`, coloured and prefixed by Ray or not."""
    rows, unreadable = [], 0
    with path.open(errors="replace") as lines:
        for line in lines:
            if not (found := STEP.search(ANSI.sub("", line))):
                continue
            row = {"step": float(found.group(1))}
            for pair in found.group(2).strip().split(" - "):
                key, _, text = pair.rpartition(":")
                value = _number(NUMPY.sub(r"\1", text))
                if key and value is not None:
                    row[key] = value
                else:
                    unreadable += 1
            rows.append(row)
    notes = [f"{unreadable} value(s) of the log are not numbers and left out"] if unreadable else []
    return rows, notes


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return {"True": 1.0, "False": 0.0}.get(text)


def _event_rows(path: Path) -> list[dict[str, float]]:
    if importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentMismatchError(
            f"RUN {path}: these are TensorBoard events, and tensorboard is not installed. Allowed without it: a .jsonl "
            "metrics file or a console log. Remedy: pip install tensorboard"
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            rows.setdefault(event.step, {"step": float(event.step)})[key] = event.value
    return list(rows.values())
