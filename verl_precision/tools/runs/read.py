"""The metrics of a run, from its files: verl's metrics file, a console log, or TensorBoard events.

And the curves of the paper's figures, `expected.csv` beside a recipe, which are drawn beside a run of it.
"""

import csv
import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError

REWARD = "critic/score/mean"
EXPECTED, EXPECTED_COLUMNS = "expected.csv", ("precision", "estimator", "step", "reward")
READABLE = (
    "verl's metrics file (.jsonl, trainer.logger=[file]), a console log with lines `step:N - key:value`, TensorBoard "
    "events, or a folder with one of them, of such folders, or of arms that have one for each seed"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
_SEED = re.compile(r"(.+)/seed_\d+")
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
    sources = [source for path in paths for source in _sources(path)]
    return [_read(source, name) for source, name in zip(sources, _names(sources), strict=True)]


def read_metrics(path: Path) -> Rows:
    """Return the metrics of each step that are numbers, from a file of verl's file logger, which writes NaN as null."""
    rows = []
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            values = ((key, math.nan if value is None else value) for key, value in row["data"].items())
            numbers = {key: float(value) for key, value in values if isinstance(value, int | float)}
            rows.append({"step": row["step"], **numbers})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        problem = f"it is not a metrics file of verl's file logger ({error!r})"
        remedy = "If the run was killed while it wrote a line, remove that line."
        raise _refused(path, problem, remedy, "one JSON object a line, with `step` and `data`") from error
    return rows


def _refused(path: Path, problem: str, remedy: str, allowed: str = READABLE) -> ConfigurationError:
    return ConfigurationError(problem, setting="RUN", value=str(path), allowed=allowed, remedy=remedy)


def _sources(path: Path) -> list[Path]:
    """Return the files, or folders of TensorBoard events, that a path stands for."""
    if not path.exists():
        raise _refused(path, "there is no such file or folder", "Check the path.")
    if path.is_file():
        return [path]
    folders = [path]
    for _ in range(3):  # a run; runs or arms of a comparison; seeds of its arms
        if found := [source for folder in folders if (source := _source_in(folder))]:
            return found
        folders = [below for folder in folders for below in sorted(folder.iterdir()) if below.is_dir()]
    raise _refused(path, "there are no metrics in it", "Name the file itself.")


def _source_in(folder: Path) -> Path | None:
    """Return what to read in a folder: a metrics file, else events (the folder itself), else a log that has steps."""
    found = sorted(folder.glob("*.jsonl"))
    if not found and any(folder.glob("*tfevents*")):
        return folder
    found = found or [log for log in sorted(folder.glob("*.log")) if _log_rows(log)[0]]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise _refused(folder, f"several files could be meant: {names}", "Name the file itself.", "one of them")
    return found[0] if found else None


def _names(sources: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; a metrics file is known by its folder."""
    parts = [(s.parent if s.name == "metrics.jsonl" else s).absolute().parts for s in sources]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise _refused(sources[0], "it is given twice", "Leave one out.", "each run once")


def _read(source: Path, name: str) -> Run:
    notes: list[str] = []
    if source.is_dir() or "tfevents" in source.name:
        rows = _event_rows(source)
    elif source.suffix == ".jsonl":
        rows = read_metrics(source)
    else:
        rows, unreadable = _log_rows(source)
        notes += [f"{unreadable} value(s) of the log are not numbers and are left out"] if unreadable else []
    by_step: dict[float, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    if not by_step:
        raise _refused(source, "there is no training step in it", "Wait for the first step of the run.")
    if repeated := len(rows) - len(by_step):
        notes.append(f"{repeated} step(s) were logged more than once (a resumed run): the last counts")
    arm = of_seed.group(1) if (of_seed := _SEED.fullmatch(name)) else ""
    return Run(name, source, [by_step[step] for step in sorted(by_step)], tuple(notes), arm)


def _log_rows(path: Path) -> tuple[Rows, int]:
    """Read `step:3 - critic/score/mean:-32.8 - ...`, coloured and prefixed by Ray or not; count what is no number."""
    rows, unreadable = [], 0
    with path.open(errors="replace") as lines:
        for found in filter(None, (_STEP.search(_COLOUR.sub("", line)) for line in lines)):
            row: dict[str, float] = {"step": int(found.group(1))}
            for pair in found.group(2).strip().split(" - "):
                key, _, text = pair.rpartition(":")
                text = _NUMPY.sub(r"\1", text) if key else "no number"
                try:
                    row[key] = float({"True": "1", "False": "0"}.get(text, text))
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


def read_expected(path: Path, estimator: str) -> list[Run]:
    """Return the reward curves of an estimator, one for each precision; refuse a file that cannot be read or has none.

    The file has `EXPECTED_COLUMNS`, and lines with `#`, which say where the numbers come from.
    """
    curves = _expected_curves(path)
    if estimator not in curves:
        problem, allowed = f"{path} has no curve of it", ", ".join(sorted(curves)) or "none"
        raise ConfigurationError(problem, setting="--estimator", value=estimator, allowed=allowed)
    return curves[estimator]


def _expected_curves(path: Path) -> dict[str, list[Run]]:
    """Return the curves of each estimator."""
    found: dict[str, dict[str, Rows]] = {}
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            rows = found.setdefault(row["estimator"], {}).setdefault(row["precision"], [])
            rows.append({"step": float(row["step"]), REWARD: float(row["reward"])})
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        problem = f"it cannot be read ({error!r})"
        allowed = f"a CSV file with the columns {', '.join(EXPECTED_COLUMNS)}, such as recipes/sanity/{EXPECTED}"
        raise ConfigurationError(problem, setting="--expected", value=str(path), allowed=allowed) from error
    return {
        estimator: [Run(f"paper: {precision}", path, rows) for precision, rows in curves.items()]
        for estimator, curves in found.items()
    }


def expected_of(recipe: Path, folder: Path) -> list[Run]:
    """Return the curves that belong to a run, by Hydra's files in its folder; none where the recipe has none for it.

    A run on a CPU has a tiny model, of which the paper says nothing.
    """
    path = recipe.parent / EXPECTED
    if not path.is_file():
        return []
    choices = yaml.safe_load((folder / "hydra" / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    return [] if choices["scale"].startswith("cpu") else _expected_curves(path).get(choices["estimator"], [])
