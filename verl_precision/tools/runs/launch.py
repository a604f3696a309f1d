"""Runs verl once, with its own Ray, a log file and progress from that log; ends all its processes.

Every process of a run has a mark in its environment. All processes with the mark are ended, whoever started them.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from verl_precision.base.errors import RunFailedError
from verl_precision.base.files import table_of
from verl_precision.base.overrides import quoted
from verl_precision.base.owner import RUN_MARK
from verl_precision.base.signals import ended_by_signals
from verl_precision.tools.runs.failure_report import reason

_POLL_SECONDS, _GRACE_SECONDS, _ASKED_SECONDS = 0.5, 20.0, 5.0
WORKER_PYTHON = "VERL_PRECISION_WORKER_PYTHON"  # variable: a command that Ray starts workers with (fork_server)
STAGES = table_of(__file__, "stages.yaml")
TOTAL_STEPS = re.compile(r"Training Progress:\s+\d+%\|.*?\|\s*\d+/(\d{1,15})(?!\d)")


def verl_command(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command a user would type to run a recipe's YAML with Hydra overrides."""
    recipe = ["--config-dir", str(config.parent), "--config-name", config.stem]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *recipe, *overrides]


def run_verl(
    config: Path,
    overrides: Sequence[str],
    folder: Path,
    on_progress: Callable[[str, float], None] = lambda stage, seconds: None,
    goes_on: bool = False,
    threads: int | None = None,
) -> float:
    """Run verl to its end; return the wall-clock seconds of this start.

    The new folder gets `train.log`, `metrics.jsonl` and Hydra's own files. With `goes_on`, it may be the folder of an
    interrupted start: first, the processes and Ray's files of that start are removed; the next log is `train-2.log`.
    Twice a second `on_progress` is called with verl's stage or its step, and the seconds since the start.
    `threads` is the `OMP_NUM_THREADS` of all processes, if none is set. On Ctrl-C, SIGTERM and SIGHUP every process
    of the run ends; if verl fails, Ray's logs are kept until the next start.
    """
    folder.mkdir(parents=True, exist_ok=goes_on)
    starts = len(list(folder.glob("train*.log")))
    log, metrics = folder / (f"train-{starts + 1}.log" if starts else "train.log"), folder / "metrics.jsonl"
    mark = uuid.uuid5(uuid.NAMESPACE_URL, folder.resolve().as_uri()).hex  # the same at each start of this run
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    start, process, returncode, python = time.monotonic(), None, 0, os.environ.get(WORKER_PYTHON)
    with ended_by_signals():
        end_marked(mark)
        # Short, because Ray puts UNIX sockets into it and their paths are limited to 107 bytes.
        ray_folder = Path(temporary_folder(), f"vp-ray-{mark[:8]}")
        shutil.rmtree(ray_folder, ignore_errors=True)  # what an earlier start of the run has left
        ray_folder.mkdir(mode=0o700)
        environment |= {"VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONUNBUFFERED": "1", RUN_MARK: mark}
        environment["VLLM_RPC_BASE_PATH"] = str(ray_folder)  # for vLLM's sockets
        command = [
            *verl_command(config, overrides),
            "trainer.logger=[console,file]",
            f"hydra.run.dir={quoted(folder / 'hydra')}",
            f"+ray_kwargs.ray_init._temp_dir={quoted(ray_folder)}",
            *([f"+ray_kwargs.ray_init.runtime_env.py_executable={quoted(python)}"] if python else []),
        ]
        try:
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            returncode = _follow(process, log, metrics, start, on_progress)
        finally:
            end_processes(process, mark)
            if returncode == 0:
                shutil.rmtree(ray_folder, ignore_errors=True)  # sockets of processes that are closing may vanish
    if returncode != 0:
        why = f"verl ended with exit code {returncode}:\n{reason(log, returncode)}"
        raise RunFailedError(f"{why}\nLog: {log}\nRay's own logs: {ray_folder}/session_latest/logs")
    return time.monotonic() - start


def temporary_folder() -> str:
    """Return the folder of temporary files, or /tmp if Ray cannot use its path (not ASCII, or with *, ? or [)."""
    folder = tempfile.gettempdir()
    return "/tmp" if re.search(r"[^ -~]|[*?\[]", folder) else folder


def _follow(
    process: subprocess.Popen, log: Path, metrics: Path, start: float, on_progress: Callable[[str, float], None]
) -> int:
    """Report verl's progress until verl has ended; return its exit code."""
    stage, total = -1, "?"
    former = metrics.stat().st_mtime_ns if metrics.exists() else None  # rows of an earlier start: no progress yet
    with log.open(errors="replace") as lines:
        while True:
            returncode = process.poll()
            for line in lines:
                stage = max([stage, *(number for number, (said, _) in enumerate(STAGES) if re.search(said, line))])
                if match := TOTAL_STEPS.search(line):
                    total = match[1]
            written = metrics.exists() and metrics.stat().st_mtime_ns != former
            step = metrics.read_bytes().count(b"\n") if written else 0
            text = f"step {step}/{total}" if step else STAGES[stage][1] if stage >= 0 else "starting verl"
            on_progress(text, time.monotonic() - start)
            if returncode is not None:
                return returncode
            time.sleep(_POLL_SECONDS)


def end_processes(process: subprocess.Popen | None, mark: str) -> None:
    """End the driver, which has some seconds to end by itself, and every process that carries its run's mark."""
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    end_marked(mark)


def end_marked(mark: str) -> None:
    """End every process that carries a mark, first by SIGTERM, then by SIGKILL; remove verl's sockets."""
    for end in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        if not (left := marked_processes(mark)):  # each time: a process may have started others
            break
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                end(survivor)
        psutil.wait_procs(left, timeout=_ASKED_SECONDS)
    for socket in Path("/tmp").glob(f"rl-colocate-zmq-{mark[:12]}-*"):
        socket.unlink(missing_ok=True)


def marked_processes(mark: str = "") -> list[psutil.Process]:
    """Return the live processes whose environment has a mark that begins with `mark`."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        carried = (process.info["environ"] or {}).get(RUN_MARK)  # None: another user's process
        if carried is not None and carried.startswith(mark) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
