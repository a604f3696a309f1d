"""Run verl once: private Ray, log to a file, progress from the log, and nothing left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import RunFailedError
from verl_precision.failure_report import reason
from verl_precision.processes import RUN_MARK, end_processes
from verl_precision.runs.fork_server import ForkServer
from verl_precision.runs.stages import STAGES, TOTAL_STEPS, stage_of

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        stage: what it is doing.
        step: training steps done.
        total_steps: steps to do, or None while unknown.
        seconds: since it started.
    """

    stage: str
    step: int
    total_steps: int | None
    seconds: float


def verl_command(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command a user would type to run this config.

    Args:
        config: the recipe's YAML.
        overrides: Hydra overrides.
    """
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(config.parent), "--config-name", config.stem),
        *overrides,
    ]


def quoted(path: Path | str) -> str:
    """Return a path or text as a value in a Hydra override, whatever characters it has."""
    return "'" + str(path).replace("'", "\\'") + "'"


def run_verl(
    config: Path,
    overrides: Sequence[str],
    folder: Path,
    on_progress: Callable[[Progress], None],
    fork_server: ForkServer | None = None,
) -> float:
    """Run verl to its end.

    Args:
        config: the recipe's YAML.
        overrides: Hydra overrides.
        folder: receives `train.log`, `metrics.jsonl` and Hydra's own files; created.
        on_progress: called about twice a second.
        fork_server: where Ray's workers are forked; with None Ray starts each by itself.

    Returns:
        Wall-clock seconds.

    Raises:
        RunFailedError: when verl fails; Ray's logs are kept then and named.
        KeyboardInterrupt: passed on after every process of the run has ended.
    """
    folder.mkdir(parents=True)
    log, metrics = folder / "train.log", folder / "metrics.jsonl"
    # Short, because Ray puts UNIX sockets into it and their paths are limited to 107 bytes.
    ray_folder = Path(tempfile.mkdtemp(prefix="vp-ray-"))
    mark = uuid.uuid4().hex
    command = [
        *verl_command(config, overrides),
        "trainer.logger=[console,file]",
        f"hydra.run.dir={quoted(folder / 'hydra')}",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]
    if fork_server is not None:
        command.append(f"+ray_kwargs.ray_init.runtime_env.py_executable={quoted(fork_server.executable)}")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {RUN_MARK: mark, "VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _follow(process, log, metrics, start, on_progress)
    finally:
        end_processes(process, mark)
    if process.returncode != 0:
        raise RunFailedError(
            f"verl ended with exit code {process.returncode}:\n{reason(log, process.returncode)}\nLog: {log}\n"
            f"Ray's own logs: {ray_folder}/session_latest/logs"
        )
    shutil.rmtree(ray_folder, ignore_errors=True)  # sockets of processes that are still closing may vanish under us
    return time.monotonic() - start


def _follow(
    process: subprocess.Popen, log: Path, metrics: Path, start: float, on_progress: Callable[[Progress], None]
) -> None:
    stage, total = -1, None
    with log.open(errors="replace") as lines:
        while True:
            ended = process.poll() is not None
            for line in lines:
                stage = stage_of(line, stage)
                if match := TOTAL_STEPS.search(line):
                    total = int(match.group(1))
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            text = "training" if step else STAGES[stage][1] if stage >= 0 else "starting verl"
            on_progress(Progress(text, step, total, time.monotonic() - start))
            if ended:
                return
            time.sleep(_POLL_SECONDS)
