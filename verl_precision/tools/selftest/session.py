"""The self-test: short runs of verl's own `main_ppo`, some with a fault that must stop them, and selftest.json."""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from verl_precision.base.errors import CheckFailedError, ConfigurationError, RunFailedError, require, sentence
from verl_precision.base.files import table_of
from verl_precision.base.overrides import quoted
from verl_precision.base.versions import installed_versions
from verl_precision.mismatch.metric_names import K3_KL
from verl_precision.tools.runs.fork_server import workers_forked_on_cpu
from verl_precision.tools.runs.launch import run_verl
from verl_precision.tools.runs.read import Rows, read_metrics
from verl_precision.tools.show.tables import write_json
from verl_precision.tools.tiny_model import write_problems
from verl_precision.weight_sync import manifest

Figures = dict[str, float | int | str]  # what a check measured, by name with its unit
Function = Callable[[str, Path], Figures]


class Check(NamedTuple):
    """One check."""

    shows: str  # what it shows if it passes
    function: Function  # takes the device and a new folder; returns its measurements, or raises
    needs_gpu: str = ""  # why a CPU cannot run it


SECONDS = 600  # limit for one run
RECIPE = Path(__file__).with_name("stack.yaml")
_LOSS_SCALE, _TOO_LARGE = "actor_rollout_ref.actor.fsdp_config.loss_scale", 2.0**32


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return the reward of all these runs, minus the response's length: any policy can learn to write less."""
    return -float(len(solution_str))


def _trains(device: str, folder: Path, overrides: Sequence[str], reports: str = "", sleeps: bool = False) -> Figures:
    """Train two steps with these overrides; both steps must be healthy."""
    rows = _run(device, folder, "trainer.total_training_steps=2", *overrides, sleeps=sleeps)
    _healthy(rows, steps=2)
    layers = {reports: rows[-1][f"weight_sync/{reports}"]} if reports else {}
    return {**layers, K3_KL: rows[-1][K3_KL]}


def _stops(device: str, folder: Path, override: str, words: str) -> Figures:
    """Run with a fault that an override plants; the run must stop with the manifest's words of this name."""
    try:
        _run(device, folder, "trainer.total_training_steps=1", override)
    except RunFailedError as error:
        first = next((line for line in str(error).splitlines() if getattr(manifest, words) in line), None)
        require(first is not None, f"the run stopped, but for another reason: {error}")
        return {"message": str(first).strip()[:200]}
    raise CheckFailedError("the run went on with the planted fault")


def _overflows(device: str, folder: Path) -> Figures:
    """Train two steps from a loss scale at which every gradient overflows FP16."""
    rows = _run(device, folder, "trainer.total_training_steps=2", f"{_LOSS_SCALE}.initial={_TOO_LARGE}")
    found = [(row["precision/skipped_steps"], row["precision/loss_scale"]) for row in rows]
    expected = [(1, _TOO_LARGE / 2), (1, _TOO_LARGE / 4)]
    require(found == expected, f"skipped updates and loss scales are {found}; expected: {expected}")
    return {"last_scale": found[-1][1]}


def _compares(device: str, folder: Path) -> Figures:
    """Train three steps in FP16 and in BF16; compare the mismatch."""
    gaps = {}
    for precision in ("fp16", "bf16"):
        rows = _run(device, folder / precision, f"precision={precision}")
        _healthy(rows, steps=3)
        gaps[precision] = sum(row[K3_KL] for row in rows) / len(rows)
    times = gaps["bf16"] / gaps["fp16"]
    require(times > 10, f"the k3 is only {times:.1f} times smaller in FP16; expected: 50 to 100 times")
    return {"k3_fp16": gaps["fp16"], "k3_bf16": gaps["bf16"], "times": times}


def _healthy(rows: Rows, steps: int) -> None:
    require(len(rows) == steps, f"{len(rows)} of {steps} steps were done")
    for row in rows:
        gap, bound = row.get("weight_sync/canary_gap"), row.get("weight_sync/canary_bound", 0.0)
        require(gap is None or gap < bound, f"the canary's gap is {gap} nats, its bound {bound}")
        require(row[K3_KL] < 0.1, f"{K3_KL} is {row[K3_KL]:g}: the rollout samples from another policy")


def _run(device: str, folder: Path, *overrides: str, sleeps: bool = False) -> Rows:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    write_problems(data, "selftest", ((f"say {number}", "") for number in range(32)))
    own = [f"scale={'cpu' if device == 'cpu' else '1x1_gpu'}", f"reward.custom_reward_function.path={quoted(__file__)}"]
    own += [f"data.{files}={quoted(data)}" for files in ("train_files", "val_files")]
    if device != "cpu":  # for a short start-up: no CUDA graphs, no profiling of memory, which others may use, too
        rollout = "actor_rollout_ref.rollout"
        own += [f"{rollout}.enforce_eager=True", f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={2**30}"]
        own += [f"{rollout}.free_cache_engine={sleeps}", f"++{rollout}.enable_sleep_mode={sleeps}"]
    end = time.monotonic() + SECONDS

    def in_time(*progress: object) -> None:
        require(time.monotonic() < end, f"its run was not done after {SECONDS} s")

    with workers_forked_on_cpu():
        run_verl(RECIPE, [*own, *overrides], folder / "run", in_time)
    return read_metrics(folder / "run" / "metrics.jsonl")


_FUNCTIONS: dict[str, Callable[..., Figures]] = dict(
    trains=_trains, stops=_stops, overflows=_overflows, compares=_compares
)
CHECKS = {
    name: Check(row["shows"], partial(_FUNCTIONS[row["by"]], **row.get("with", {})), row.get("needs_gpu", ""))
    for name, row in table_of(__file__, "checks.yaml").items()
}
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
        write_json(folder / REPORT, report)
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
        "cores": os.cpu_count(), "cuda": torch.version.cuda if on_gpu else None, "versions": installed_versions(),
    }  # fmt: skip
