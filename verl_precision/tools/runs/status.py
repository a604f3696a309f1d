"""The status of a run: is it running, its step, its remaining time, its latest metrics.

The status comes from the run's own files: its metrics, its log beside them, and Hydra's copy of its config. The copy
names the recipe; beside the recipe, `expected.csv` has the curves of the paper's figures.
"""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.table import Table

from verl_precision.base.dtypes import short
from verl_precision.base.files import open_regular
from verl_precision.base.state import plain_yaml
from verl_precision.mismatch.alarm import MismatchAlarm, remedies_in_use
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.mismatch.verdict import Judge
from verl_precision.tools.runs.curves import PANELS, Points
from verl_precision.tools.runs.launch import TOTAL_STEPS
from verl_precision.tools.runs.read import LARGEST_STEP, REWARD, Rows, Run, step_of
from verl_precision.tools.show.tables import number_text, terminal_table

State = Literal["waiting", "running", "finished", "stopped growing", "recorded", "unreadable"]
RECENT = 20  # steps that give the typical time of a step
# A run has stopped growing if its newest row is older than PATIENCE * its slowest recent step and PATIENCE_SECONDS.
PATIENCE, PATIENCE_SECONDS = 4.0, 60.0
_LONGEST, _TAIL = 1e9, 2**16  # seconds of a step; bytes of a log
_MOST = 2**24  # bytes of another file beside a run
EXPECTED = "expected.csv"
# The numbers at the top of a run: title -> curves, of which the first measured curve is shown.
NOW: dict[str, Sequence[str]] = {
    "reward": ["reward/reward"],
    "k3": ["k3/k3"],
    "effective sample": [f"sample/{label}" for each in PANELS if each.name == "sample" for label in each.metrics],
    "phantom-clipped": ["phantom/phantom"],
    "canary": ["canary/gap"],
    "loss scale": ["scale/scale"],
    "tokens/s per GPU": ["throughput/throughput"],
}


@dataclass(frozen=True)
class RunStatus:
    """The status of a run; a field is None if its value is not known."""

    state: State
    step: int | None = None
    total: int | None = None  # steps of the whole run
    step_seconds: float | None = None  # median of the recent steps
    seconds_left: float | None = None
    age: float | None = None  # seconds since the newest row
    now: Mapping[str, str] = field(default_factory=dict)  # title in `NOW` -> newest value, as text


def status_of(run: Run, points: Points, total: int | None, age: float | None) -> RunStatus:
    """Return the status of a run of `total` steps; its newest row is `age` seconds old (None: a recorded run)."""
    if not run.rows:
        return RunStatus("waiting")
    step = int(run.rows[-1]["step"])
    recent = list(points.get("step_time/step", {}).values())[-RECENT:]
    seconds = [value for value in recent if 0 <= value < _LONGEST]
    typical = median(seconds) if seconds else None
    state: State = "running"
    if total is not None and step >= total:
        state = "finished"
    elif age is None:
        state = "recorded"
    elif age > max(PATIENCE_SECONDS, PATIENCE * max(seconds, default=0.0)):
        state = "stopped growing"
    left = typical * (total - step) if state == "running" and typical is not None and total is not None else None
    measured = {title: next((points[at] for at in curves if points.get(at)), None) for title, curves in NOW.items()}
    now = {title: number_text([*curve.values()][-1]) for title, curve in measured.items() if curve}
    return RunStatus(state, step, total, typical, left, age, now)


def total_steps(source: Path) -> int | None:
    """Return a run's total steps, from the newest log beside its metrics, or from its config; None if not known."""
    logs = [log for log in source.parent.glob("*.log") if log.is_file()]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        with open_regular(log, most=math.inf) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            if said := TOTAL_STEPS.findall(file.read(_TAIL).decode(errors="replace")):
                return int(said[-1])
    total = at(hydra_of(source, "config.yaml"), "trainer", "total_training_steps")
    return total if isinstance(total, int) and abs(total) < LARGEST_STEP else None


def read_expected(path: Path, estimator: str) -> list[Run]:
    """Return the reward curves of an estimator, one for each precision; lines with # name the source."""
    found: dict[str, Rows] = {}
    with open_regular(path, most=_MOST) as file:
        lines = [line for line in file.read().decode().splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            if row["estimator"] == estimator:
                point = {"step": step_of(float(row["step"])), REWARD: float(row["reward"])}
                found.setdefault(str(row["precision"]), []).append(point)
    return [Run(f"paper: {precision}", path, rows) for precision, rows in found.items()]


def expected_of(source: Path) -> list[Run]:
    """Return the expected curves beside the recipe that Hydra's copy names; none for a tiny model on a CPU."""
    hydra = at(hydra_of(source, "hydra.yaml"), "hydra")
    sources, name = at(hydra, "runtime", "config_sources"), at(hydra, "job", "config_name")
    places = [each for each in sources if at(each, "schema") == "file"] if isinstance(sources, list) else []
    recipes = (Path(str(at(place, "path")), f"{name}.yaml") for place in places)
    recipe = next((recipe for recipe in recipes if recipe.is_file()), None)
    scale, estimator = (at(hydra, "runtime", "choices", group) for group in ("scale", "estimator"))
    if recipe is None or not isinstance(scale, str) or not isinstance(estimator, str) or scale.startswith("cpu"):
        return []
    path = recipe.with_name(EXPECTED)
    return read_expected(path, estimator) if path.is_file() else []


def judge_of(source: Path) -> Judge:
    """Return a judge with the alarm settings, and the remedies in use, of Hydra's copy of a run's config."""
    config = hydra_of(source, "config.yaml")
    model, correction = at(config, "actor_rollout_ref"), at(config, "algorithm", "rollout_correction")
    actor, rollout = at(model, "actor"), at(model, "rollout")
    engine = at(rollout, "engine_kwargs", str(at(rollout, "name")))
    train = short(at(actor, "fsdp_config", "mixed_precision", "param_dtype") or "bf16")  # verl's default
    samples = short(at(engine, "dtype") or at(rollout, "dtype"))
    sequences = str(at(actor, "policy_loss", "loss_mode")).startswith("vp_pg_seq_")
    sequences |= at(correction, "rollout_is") in ("vp_seq_mis", "sequence")
    verifies = str(at(engine, "worker_extension_cls")).startswith("verl_precision.")
    known = str(at(actor, "strategy")).startswith("fsdp") and "$" not in train + samples  # `${...}` is not resolved
    in_use = remedies_in_use(train, samples, sequences, verifies) if known else ()
    settings = dict(at(config, "mismatch", "alarm") or {})
    settings.pop("notify", None)  # whom a run told says nothing of it, and names variables that only its process has
    return Judge(MismatchAlarm(AlarmSettings(**settings), in_use))


def at(content: Any, *keys: str) -> Any:
    """Return the value below a chain of nested keys; None if there is no value."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def hydra_of(source: Path, name: str) -> Any:
    """Return the content of a file that Hydra has written beside a run's metrics; None if there is no file."""
    for path in (source.parent / "hydra" / ".hydra" / name, source.parent / ".hydra" / name):
        if path.is_file():
            with open_regular(path, most=_MOST) as file:
                return plain_yaml(file.read().decode())
    return None


def status_table(rows: Sequence[tuple[str, RunStatus, Sequence[str]]]) -> Table:
    """Return a table of runs for a terminal: name, state, names of its alarms, steps done and time left, numbers."""
    titles = list(dict.fromkeys(title for _, each, _ in rows for title in each.now))
    cells, red = list[list[str]](), list[int]()
    for number, (name, each, alarms) in enumerate(rows):
        steps = "/".join(str(number) for number in (each.step, each.total) if number is not None)
        left = "" if each.seconds_left is None else str(timedelta(seconds=round(min(each.seconds_left, 1e13))))
        numbers = [each.now.get(title, "") for title in titles]
        cells.append([name, each.state, ", ".join(alarms) or "-", steps, left, *numbers])
        red += [number] if alarms or each.state in ("stopped growing", "unreadable") else []
    return terminal_table(("run", "state", "alarms", "step", "left", *titles), cells, words=3, red=red)
