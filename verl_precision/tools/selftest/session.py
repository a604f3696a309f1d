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
import traceback
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
from verl_precision.base.owner import RUN_MARK
from verl_precision.base.signals import completed
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.failure_report import reason
from verl_precision.tools.runs.launch import end_processes
from verl_precision.tools.selftest.checks import CHECKS, Check, Figures

REPORT = "selftest.json"
_GRACE_SECONDS = 60  # a check that is asked to end first ends its run of verl, which has marks of its own
_RUN_BYTES, _RUN_GPU_BYTES = 8 * 10**9, 3 * 10**9  # of one run of part B
_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


@dataclass(frozen=True)
class Outcome:
    """A check's name, "passed", "failed" or "not run", wall-clock seconds, why it has not passed, what it measured."""

    name: str
    status: str
    seconds: float = 0.0
    message: str = ""
    figures: Figures = field(default_factory=dict)

    @property
    def line(self) -> str:
        """One line, in the markup of rich."""
        values = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in self.figures.items()}
        text = self.message or ", ".join(f"{key} {value}" for key, value in values.items())
        return f"[{_COLOURS[self.status]}]{self.status:8}[/] {self.name:20} {self.seconds:5.0f} s  {escape(text)}"


def run_selftest(folder: Path, device: str, names: Sequence[str], parallel: int, console: Console) -> list[Outcome]:
    """Run the named checks ("A" or "B" for a part; none for all), show each as it ends, and write selftest.json.

    A check that passed in this folder is not repeated, and earlier results of others stay. Of part B `parallel` checks
    run at a time. A folder with results of another machine is refused.
    """
    chosen, machine = _chosen(names), _machine(device)
    known = _earlier(folder / REPORT, machine)
    under_way: set[subprocess.Popen] = set()
    interrupted = threading.Event()

    def run(check: Check) -> None:
        if check.needs_gpu and device == "cpu":
            known[check.name] = Outcome(check.name, "not run", message=f"on a CPU: {check.needs_gpu}")
        elif check.name not in known or known[check.name].status != "passed":
            outcome = None if interrupted.is_set() else _run_in_process(check, device, folder / check.name, under_way)
            if outcome is None or interrupted.is_set():
                return
            known[check.name] = outcome
        results = [asdict(known[each.name]) for each in CHECKS if each.name in known]
        write_file(folder / REPORT, json.dumps({**machine, "checks": results}, indent=2) + "\n", replace=True)
        console.print(known[check.name].line, highlight=False, soft_wrap=True)

    together = [check for check in chosen if check.part == "B" and not check.alone]
    for check in chosen:
        if check not in together:
            run(check)
    with ThreadPoolExecutor(parallel) as pool:
        try:
            for future in completed([pool.submit(run, check) for check in together]):
                future.result()
        except KeyboardInterrupt:  # only this thread gets it
            interrupted.set()
            for process in list(under_way):
                process.send_signal(signal.SIGINT)
            raise
    return [known[check.name] for check in chosen]


def runs_that_fit(device: str) -> int:
    """Return how many runs of part B the free memory holds: at least one, at most 3, on a CPU at most 2."""
    import torch

    fit = min(psutil.virtual_memory().available // _RUN_BYTES, 3 if device == "cuda" else 2)
    if device == "cuda":
        fit = min(fit, torch.cuda.mem_get_info()[0] // _RUN_GPU_BYTES)
    return max(1, fit)


def show_summary(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print one line a check: what it shows, and its result."""
    table = Table("part", "check", "shows", "result", box=None)
    status = {outcome.name: outcome.status for outcome in outcomes}
    for check in CHECKS:
        result = status.get(check.name, "not asked for")
        table.add_row(check.part, check.name, check.shows, f"[{_COLOURS.get(result, 'white')}]{result}[/]")
    console.print(table)


def _chosen(names: Sequence[str]) -> list[Check]:
    known = {check.name for check in CHECKS} | {check.part for check in CHECKS}
    for name in names:
        if name not in known:
            allowed = ", ".join(sorted(known))
            raise ConfigurationError("there is no such check", setting="--only", value=name, allowed=allowed)
    return [check for check in CHECKS if not names or check.name in names or check.part in names]


def _machine(device: str) -> dict[str, Any]:
    import torch

    on_gpu = device == "cuda"
    return {
        "device": device,
        "hardware": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda if on_gpu else None,
        "versions": installed_versions(),
    }


def _earlier(path: Path, machine: dict[str, Any]) -> dict[str, Outcome]:
    """Return the results of earlier calls, by check."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    found = {one["name"]: Outcome(**one) for one in content.pop("checks")}
    if content != machine:
        raise ConfigurationError(
            "the folder has results of another machine or of other versions",
            setting="--output",
            value=str(path.parent),
            remedy="Name another folder.",
        )
    return found


def _run_in_process(check: Check, device: str, folder: Path, under_way: set[subprocess.Popen]) -> Outcome:
    """Run a check in a process of its own: what it breaks ends with it."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=time.strftime("%H-%M-%S-"), dir=folder))  # of this attempt
    log, result, mark, start = scratch / "check.log", scratch / "outcome.json", uuid.uuid4().hex, time.monotonic()
    command = [sys.executable, "-m", "verl_precision.tools.selftest.session", check.name, device, str(scratch)]
    environment = {**os.environ, RUN_MARK: mark, **({"VERL_PLATFORM": "cpu"} if device == "cpu" else {})}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    under_way.add(process)
    late = ""
    try:
        process.wait(check.seconds)
    except subprocess.TimeoutExpired:
        late = f"not done after {check.seconds} s."
    finally:
        end_processes(process, mark, grace_seconds=_GRACE_SECONDS)
        under_way.discard(process)
    seconds = time.monotonic() - start
    if result.exists():
        return Outcome(check.name, seconds=seconds, **json.loads(result.read_text()))
    return Outcome(check.name, "failed", seconds, f"{late or reason(log, process.returncode)} Log: {log}")


def _in_this_process(name: str, device: str, folder: Path) -> None:
    check = next(check for check in CHECKS if check.name == name)
    outcome: dict[str, Any]
    try:
        outcome = {"status": "passed", "figures": check.load()(device, folder)}
    except Exception as error:
        traceback.print_exc()
        words = sentence(f"{type(error).__name__}: {error}")
        outcome = {"status": "failed", "message": f"{words} Log: {folder / 'check.log'}"}
    write_file(folder / "outcome.json", json.dumps(outcome))


if __name__ == "__main__":
    _in_this_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
