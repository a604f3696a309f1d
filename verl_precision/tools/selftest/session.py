"""The self-test from beginning to end: one process a check, progress, the table, selftest.json."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
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
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.failure_report import reason
from verl_precision.tools.runs.launch import end_processes
from verl_precision.tools.selftest import engine_checks, stack_checks  # noqa: F401 - they register their checks
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


class _Running:
    """A check in a process of its own: what it breaks ends with it."""

    def __init__(self, check: Check, device: str, folder: Path) -> None:
        (folder / check.name).mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=time.strftime("%H-%M-%S-"), dir=folder / check.name))  # of this attempt
        self.check, self._log, self._result = check, scratch / "check.log", scratch / "outcome.json"
        self._mark, self._start = uuid.uuid4().hex, time.monotonic()
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "verl_precision.tools.selftest.session", check.name, device, str(scratch)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, RUN_MARK: self._mark, **({"VERL_PLATFORM": "cpu"} if device == "cpu" else {})},
                start_new_session=True,
            )

    @property
    def over(self) -> bool:
        """Whether it has ended, or its time has."""
        return self.process.poll() is not None or time.monotonic() > self._start + self.check.seconds

    def end(self) -> None:
        """End the process and all that it started."""
        end_processes(self.process, self._mark, grace_seconds=_GRACE_SECONDS)

    def outcome(self) -> Outcome:
        """End it and return its outcome; without one it has failed."""
        late = self.process.poll() is None
        self.end()
        seconds = time.monotonic() - self._start
        if self._result.exists():
            return Outcome(self.check.name, seconds=seconds, **json.loads(self._result.read_text()))
        why = f"not done after {self.check.seconds} s." if late else reason(self._log, self.process.returncode)
        return Outcome(self.check.name, "failed", seconds, f"{why} Log: {self._log}")


def run_selftest(folder: Path, device: str, names: Sequence[str], parallel: int, console: Console) -> list[Outcome]:
    """Run the named checks ("A" or "B" for a part; none for all), show each as it ends, and write selftest.json.

    A check that passed in this folder is not repeated, and earlier results of others stay. Checks that are alone come
    first; of the others `parallel` run at a time. A folder with results of another machine is refused.
    """
    chosen, machine = _chosen(names), _machine(device)
    known = _earlier(folder / REPORT, machine)
    running: list[_Running] = []

    def note(outcome: Outcome) -> None:
        known[outcome.name] = outcome
        results = [asdict(known[name]) for name in CHECKS if name in known]
        write_file(folder / REPORT, json.dumps({**machine, "checks": results}, indent=2) + "\n", replace=True)
        console.print(outcome.line, highlight=False, soft_wrap=True)

    def may_start(check: Check) -> bool:
        together = not check.alone and not any(each.check.alone for each in running)
        return not running or (together and len(running) < parallel)

    waiting = []
    for check in sorted(chosen, key=lambda check: not check.alone):
        if check.needs_gpu and device == "cpu":
            note(Outcome(check.name, "not run", message=f"on a CPU: {check.needs_gpu}"))
        elif check.name in known and known[check.name].status == "passed":
            note(known[check.name])
        else:
            waiting.append(check)
    try:
        while waiting or running:
            while waiting and may_start(waiting[0]):
                running.append(_Running(waiting.pop(0), device, folder))
            for one in [one for one in running if one.over]:
                note(one.outcome())
                running.remove(one)
            time.sleep(0.1)
    finally:
        for one in running:  # interrupted: all are asked before one is waited for
            one.process.send_signal(signal.SIGINT)
        for one in running:
            one.end()
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
    for check in CHECKS.values():
        result = status.get(check.name, "not asked for")
        table.add_row(check.part, check.name, check.shows, f"[{_COLOURS.get(result, 'white')}]{result}[/]")
    console.print(table)


def _chosen(names: Sequence[str]) -> list[Check]:
    known = {*CHECKS, *(check.part for check in CHECKS.values())}
    for name in names:
        if name not in known:
            allowed = ", ".join(sorted(known))
            raise ConfigurationError("there is no such check", setting="--only", value=name, allowed=allowed)
    return [check for check in CHECKS.values() if not names or check.name in names or check.part in names]


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
        problem, remedy = "the folder has results of another machine or of other versions", "Name another folder."
        raise ConfigurationError(problem, setting="--output", value=str(path.parent), remedy=remedy)
    return found


def _in_this_process(name: str, device: str, folder: Path) -> None:
    outcome: dict[str, Any]
    try:
        outcome = {"status": "passed", "figures": CHECKS[name].function(device, folder)}
    except Exception as error:
        traceback.print_exc()
        words = sentence(f"{type(error).__name__}: {error}")
        outcome = {"status": "failed", "message": f"{words} Log: {folder / 'check.log'}"}
    write_file(folder / "outcome.json", json.dumps(outcome))


if __name__ == "__main__":
    _in_this_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
