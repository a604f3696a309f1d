"""The self-test from beginning to end: one process a check, a line each, selftest.json."""

import json
import os
import platform
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

from rich.console import Console
from rich.markup import escape

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.files import write_file
from verl_precision.base.owner import RUN_MARK
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.failure_report import reason
from verl_precision.tools.runs.launch import end_processes
from verl_precision.tools.selftest import stack_checks  # noqa: F401 - it registers its checks
from verl_precision.tools.selftest.checks import CHECKS, Check, Figures

REPORT = "selftest.json"
_GRACE_SECONDS = 60  # a check that is asked to end first ends its run of verl, which has marks of its own
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


def run_selftest(folder: Path, device: str, names: Sequence[str], console: Console) -> list[Outcome]:
    """Run the named checks (none: all), show each as it ends, and write selftest.json."""
    chosen, machine, outcomes = _chosen(names), _machine(device), list[Outcome]()
    for check in chosen:
        outcomes.append(_outcome(check, device, folder))
        report = {**machine, "checks": [asdict(outcome) for outcome in outcomes]}
        write_file(folder / REPORT, json.dumps(report, indent=2) + "\n", replace=True)
        console.print(outcomes[-1].line, markup=True, highlight=False, soft_wrap=True)
    return outcomes


def _outcome(check: Check, device: str, folder: Path) -> Outcome:
    """Run a check in a process of its own: what it breaks ends with it, and after its time with all it started."""
    if device == "cpu" and check.needs_gpu:
        return Outcome(check.name, "not run", message=f"on a CPU: {check.needs_gpu}")
    (folder / check.name).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=time.strftime("%H-%M-%S-"), dir=folder / check.name))  # of this attempt
    log, result = scratch / "check.log", scratch / "outcome.json"
    mark, start = uuid.uuid4().hex, time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_precision.tools.selftest.session", check.name, device, str(scratch)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, RUN_MARK: mark, **({"VERL_PLATFORM": "cpu"} if device == "cpu" else {})},
            start_new_session=True,
        )
    try:
        while process.poll() is None and time.monotonic() < start + check.seconds:
            time.sleep(0.1)
        late = process.poll() is None
    finally:
        end_processes(process, mark, grace_seconds=_GRACE_SECONDS)
    seconds = time.monotonic() - start
    if result.exists():
        return Outcome(check.name, seconds=seconds, **json.loads(result.read_text()))
    why = f"not done after {check.seconds} s." if late else reason(log, process.returncode)
    return Outcome(check.name, "failed", seconds, f"{why} Log: {log}")


def _chosen(names: Sequence[str]) -> list[Check]:
    if unknown := [name for name in names if name not in CHECKS]:
        problem, allowed = "there is no such check", ", ".join(CHECKS)
        raise ConfigurationError(problem, setting="--only", value=unknown[0], allowed=allowed)
    return [check for check in CHECKS.values() if not names or check.name in names]


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
