"""Where a run stands: does it still train, how far is it, how long will it take, and its numbers now.

Judged by what the run itself has written: its metrics, its log beside them, and Hydra's copy of its config.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Literal

from rich.table import Table

from verl_precision.base.files import open_regular
from verl_precision.tools.runs.curves import PANELS, Points
from verl_precision.tools.runs.expected import at, hydra_of
from verl_precision.tools.runs.launch import TOTAL_STEPS
from verl_precision.tools.runs.read import LARGEST_STEP, REWARD, Run
from verl_precision.tools.show.tables import number_text, percent_text, terminal_table

State = Literal["waiting", "running", "finished", "stopped growing", "recorded", "unreadable"]
RECENT = 20  # steps that say how long one takes
# A run has stopped growing if its newest row is older than so many of its slowest recent steps, and than so long.
PATIENCE, PATIENCE_SECONDS = 4.0, 60.0
_LONGEST, _TAIL = 1e9, 2**16  # seconds of a step; bytes of a log
# What stands at the top: title, the curves of which the first that is measured is shown, and how.
NOW: tuple[tuple[str, tuple[str, ...], Literal["number", "percent", "sum"]], ...] = (
    ("reward", ("reward/reward",), "number"),
    ("k3", ("k3/k3",), "number"),
    ("effective sample", tuple(f"sample/{label}" for each in PANELS if each.name == "sample" for label in each.metrics),
     "percent"),
    ("phantom-clipped", ("phantom/phantom",), "percent"),
    ("canary", ("canary/gap",), "number"),  # with its bound
    ("loss scale", ("scale/scale",), "number"),
    ("skipped updates", ("skipped/skipped",), "sum"),
    ("tokens/s per GPU", ("throughput/throughput",), "number"),
)  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands; None for what is not known."""

    state: State
    step: int | None = None
    total: int | None = None  # steps of the whole run
    step_seconds: float | None = None  # median of the recent steps
    seconds_left: float | None = None
    age: float | None = None  # seconds since the newest row
    now: Mapping[str, str] = field(default_factory=dict)  # the titles of `NOW` -> newest value, as people read it


def status_of(run: Run, points: Points, total: int | None, age: float | None, expected: Sequence[Run]) -> RunStatus:
    """Return where a run of `total` steps stands whose newest row was written `age` seconds ago; None: long ago."""
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
    return RunStatus(state, step, total, typical, left, age, _now(points, step, expected))


def _now(points: Points, step: int, expected: Sequence[Run]) -> dict[str, str]:
    found = {}
    for title, curves, kind in NOW:
        values = next((list(points[name].values()) for name in curves if points.get(name)), None)
        if values is not None:
            value = sum(value for value in values if value == value) if kind == "sum" else values[-1]
            found[title] = percent_text(value, 1) if kind == "percent" else number_text(value)
    if "canary" in found and (bound := list(points.get("canary/bound", {}).values())):
        gap = list(points["canary/gap"].values())[-1]
        found["canary"] = " of ".join(number_text(float(f"{value:.2g}")) for value in (gap, bound[-1]))
    for curve in expected if "reward" in found else ():
        reached = [row for row in curve.rows if row["step"] <= step] or curve.rows[:1]
        found[curve.name] = f"{number_text(reached[-1][REWARD])} at step {reached[-1]['step']:g}"
    return found


def total_steps(source: Path) -> int | None:
    """Return the steps of a whole run, by the newest log beside its metrics, or by its config; None if neither says."""
    folder = source if source.is_dir() else source.parent
    logs = [log for log in folder.glob("*.log") if log.is_file()]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        with open_regular(log, most=math.inf) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            if said := TOTAL_STEPS.findall(file.read(_TAIL).decode(errors="replace")):
                return int(said[-1])
    total = at(hydra_of(source, "config.yaml"), "trainer", "total_training_steps")
    return total if isinstance(total, int) and abs(total) < LARGEST_STEP else None


def duration_text(seconds: float | None) -> str:
    """Return a time as people say it: 8 s, 0:03:00, 4 days, 3:00:00; empty for None."""
    if seconds is None or seconds < 100:
        return "" if seconds is None else f"{seconds:.3g} s"
    return str(timedelta(seconds=round(min(seconds, 1e13))))


def status_table(rows: Sequence[tuple[str, RunStatus, Sequence[str]]]) -> Table:
    """Return a table of runs for a terminal: name, where it stands, names of its alarms."""
    titles = list(dict.fromkeys(title for _, each, _ in rows for title in each.now))
    cells = [
        (
            name,
            each.state if each.state != "stopped growing" else f"stopped growing {duration_text(each.age)} ago",
            ", ".join(alarms) or "-",
            "/".join(str(number) for number in (each.step, each.total) if number is not None),
            duration_text(each.step_seconds),
            duration_text(each.seconds_left),
            *(each.now.get(title, "") for title in titles),
        )
        for name, each, alarms in rows
    ]
    red = [
        number
        for number, (_, each, alarms) in enumerate(rows)
        if alarms or each.state in ("stopped growing", "unreadable")
    ]
    return terminal_table(("run", "state", "alarms", "step", "a step", "left", *titles), cells, words=3, red=red)
