"""The self-test from beginning to end: a line for each check, and selftest.json."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.files import write_file
from verl_precision.base.versions import installed_versions
from verl_precision.tools.selftest.checks import CHECKS, Figures

REPORT = "selftest.json"
_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


@dataclass(frozen=True)
class Outcome:
    """A check's name, "passed", "failed" or "not run", wall-clock seconds, why it did not pass, its measurements."""

    name: str
    status: str
    seconds: float = 0.0
    message: str = ""
    figures: Figures = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Return the outcome as one line in rich's markup."""
        values = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in self.figures.items()}
        text = self.message or ", ".join(f"{key} {value}" for key, value in values.items())
        return f"[{_COLOURS[self.status]}]{self.status:8}[/] {self.name:20} {self.seconds:5.0f} s  {escape(text)}"


def run_selftest(folder: Path, device: str, names: Sequence[str], console: Console) -> list[Outcome]:
    """Run the named checks (none: all), show each as it ends, and write selftest.json."""
    if unknown := [name for name in names if name not in CHECKS]:
        problem, allowed = "there is no such check", ", ".join(CHECKS)
        raise ConfigurationError(problem, setting="--only", value=unknown[0], allowed=allowed)
    machine, outcomes = _machine(device), list[Outcome]()
    for name in [name for name in CHECKS if not names or name in names]:
        outcomes.append(_outcome(name, device, folder))
        report = {**machine, "checks": [asdict(outcome) for outcome in outcomes]}
        write_file(folder / REPORT, json.dumps(report, indent=2) + "\n", replace=True)
        console.print(outcomes[-1].line, markup=True, highlight=False, soft_wrap=True)
    return outcomes


def _outcome(name: str, device: str, folder: Path) -> Outcome:
    check, start = CHECKS[name], time.monotonic()
    if device == "cpu" and check.needs_gpu:
        return Outcome(name, "not run", message=f"on a CPU: {check.needs_gpu}")
    (folder / name).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=time.strftime("%H-%M-%S-"), dir=folder / name))  # for this attempt
    done: dict[str, Any]
    try:
        done = {"status": "passed", "figures": check.function(device, scratch)}
    except Exception as error:
        done = {"status": "failed", "message": f"{sentence(f'{type(error).__name__}: {error}')} Its run: {scratch}"}
    return Outcome(name, seconds=time.monotonic() - start, **done)


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
