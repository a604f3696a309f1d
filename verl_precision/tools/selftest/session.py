"""The self-test from beginning to end: one process a check, progress, table, selftest.json."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.files import write_file
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.failure_report import reason
from verl_precision.tools.runs.processes import RUN_MARK, end_processes
from verl_precision.tools.selftest.checks import CHECKS, Check, Figures

REPORT = "selftest.json"
_GRACE_SECONDS = 60  # a check that is asked to end first ends its run of verl, which has marks of its own
_RUN_BYTES, _RUN_GPU_BYTES = 8 * 10**9, 3 * 10**9  # of one run of part B
_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        name: The check's.
        status: "passed", "failed" or "not run".
        seconds: Wall-clock time.
        message: What failed, or why it was not run.
        figures: What was measured.
    """

    name: str
    status: str
    seconds: float = 0.0
    message: str = ""
    figures: Figures = field(default_factory=dict)


def run_selftest(folder: Path, device: str, names: Sequence[str], side_by_side: int, console: Console) -> list[Outcome]:
    """Run checks, show each as it ends, and write selftest.json after each.

    A check that passed in this folder is not repeated. What came of earlier checks stays in selftest.json.

    Args:
        folder: Folder of the results, one subfolder a check.
        device: "cuda" or "cpu".
        names: Names of checks, "A" or "B" for a part; empty for all.
        side_by_side: How many checks of part B run at the same time.
        console: Where progress goes.

    Raises:
        ConfigurationError: If there is no check of a name, or the folder has results of another machine.
    """
    chosen = _chosen(names)
    machine = _machine(device)
    earlier = _earlier(folder / REPORT, machine)
    done: list[Outcome] = []
    under_way: set[subprocess.Popen] = set()
    interrupted = threading.Event()

    def finish(outcome: Outcome) -> None:
        done.append(outcome)
        known = earlier | {one.name: one for one in done}
        ordered = [known[check.name] for check in CHECKS if check.name in known]
        content = {**machine, "checks": [asdict(one) for one in ordered]}
        write_file(folder / REPORT, json.dumps(content, indent=2) + "\n", replace=True)
        text = outcome.message or ", ".join(f"{key} {_short(value)}" for key, value in outcome.figures.items())
        colour = _COLOURS[outcome.status]
        head = f"[{colour}]{outcome.status:8}[/] {outcome.name:20} {outcome.seconds:5.0f} s  "
        console.print(head + escape(text), highlight=False, soft_wrap=True)

    def run(check: Check) -> None:
        if check.name in earlier and earlier[check.name].status == "passed":
            finish(earlier[check.name])
        elif check.needs_gpu and device == "cpu":
            finish(Outcome(check.name, "not run", message=f"on a CPU: {check.needs_gpu}"))
        elif not interrupted.is_set():
            outcome = _run_in_process(check, device, folder / check.name, under_way)
            if not interrupted.is_set():
                finish(outcome)

    for check in chosen:
        if check.part == "A" or check.alone:
            run(check)
    with ThreadPoolExecutor(side_by_side) as pool:
        try:
            list(pool.map(run, (check for check in chosen if check.part == "B" and not check.alone)))
        except KeyboardInterrupt:  # only this thread gets it
            interrupted.set()
            for process in list(under_way):
                process.send_signal(signal.SIGINT)
            raise
    return done


def runs_that_fit(device: str) -> int:
    """Return how many runs of part B the free memory holds: at least one, at most 3, on a CPU at most 2."""
    import torch

    fit = min(psutil.virtual_memory().available // _RUN_BYTES, 3 if device == "cuda" else 2)
    if device == "cuda":
        fit = min(fit, torch.cuda.mem_get_info()[0] // _RUN_GPU_BYTES)
    return max(1, fit)


def show_summary(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print one line a check: what it shows, and what came of it."""
    table = Table(box=None)
    for column in ("part", "check", "shows", "result"):
        table.add_column(column)
    status = {outcome.name: outcome.status for outcome in outcomes}
    for check in CHECKS:
        result = status.get(check.name, "not asked for")
        table.add_row(check.part, check.name, check.shows, f"[{_COLOURS.get(result, 'white')}]{result}[/]")
    console.print(table)


def _chosen(names: Sequence[str]) -> list[Check]:
    known = {check.name for check in CHECKS} | {check.part for check in CHECKS}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                "there is no such check", setting="--only", value=name, allowed=", ".join(sorted(known))
            )
    return [check for check in CHECKS if not names or check.name in names or check.part in names]


def _machine(device: str) -> dict[str, Any]:
    import torch

    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device,
        "hardware": hardware,
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda if device == "cuda" else None,
        "versions": installed_versions(),
    }


def _earlier(path: Path, machine: dict[str, Any]) -> dict[str, Outcome]:
    """Return what came of the checks of earlier calls."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    found = [Outcome(**one) for one in content.pop("checks")]
    if content != machine:
        raise ConfigurationError(
            "the folder has results of another machine or of other versions",
            setting="--output",
            value=str(path.parent),
            remedy="Name another folder.",
        )
    return {outcome.name: outcome for outcome in found}


def _run_in_process(check: Check, device: str, folder: Path, under_way: set[subprocess.Popen]) -> Outcome:
    """Run a check in a process of its own: what it breaks ends with it."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=time.strftime("%H-%M-%S-"), dir=folder))  # of this attempt
    log, mark, start = scratch / "check.log", uuid.uuid4().hex, time.monotonic()
    command = [sys.executable, "-m", "verl_precision.tools.selftest.session", check.name, device, str(scratch)]
    environment = {**os.environ, RUN_MARK: mark, **({"VERL_PLATFORM": "cpu"} if device == "cpu" else {})}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    under_way.add(process)
    try:
        process.wait(check.seconds)
        late = ""
    except subprocess.TimeoutExpired:
        late = f"not done after {check.seconds} s. Log: {log}"
    finally:
        end_processes(process, mark, grace_seconds=_GRACE_SECONDS)
        under_way.discard(process)
    seconds = time.monotonic() - start
    result = scratch / "outcome.json"
    if result.exists():
        return Outcome(check.name, seconds=seconds, **json.loads(result.read_text()))
    message = late or f"{reason(log, process.returncode)} Log: {log}"
    return Outcome(check.name, "failed", seconds, message)


def _in_this_process(name: str, device: str, folder: Path) -> None:
    check = next(check for check in CHECKS if check.name == name)
    outcome: dict[str, Any]
    try:
        outcome = {"status": "passed", "figures": check.load()(device, folder)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        words = sentence(f"{type(error).__name__}: {error}")
        outcome = {"status": "failed", "message": f"{words} Log: {folder / 'check.log'}"}
    write_file(folder / "outcome.json", json.dumps(outcome))


def _short(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    _in_this_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
