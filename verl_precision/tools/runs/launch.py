"""Run verl once: private Ray, log to a file, progress from the log, and nothing left behind.

The processes of a run are known by a mark in their environment, and all of them are ended, whoever started them.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from verl_precision.base.errors import RunFailedError
from verl_precision.base.files import table_of
from verl_precision.base.overrides import quoted
from verl_precision.base.owner import RUN_MARK, release, take
from verl_precision.base.signals import ended_by_signals
from verl_precision.tools.runs.failure_report import reason

_MARK = "mark"  # of a scratch folder: what its processes carry
_POLL_SECONDS, _GRACE_SECONDS, _ASKED_SECONDS = 0.5, 20.0, 5.0
WORKER_PYTHON = "VERL_PRECISION_WORKER_PYTHON"  # variable: a command that Ray starts workers with (fork_server)
STAGES = table_of(__file__, "stages.yaml")
TOTAL_STEPS = re.compile(r"Training Progress:\s+\d+%\|.*?\|\s*\d+/(\d{1,15})(?!\d)")


class Progress(NamedTuple):
    """How far a run is."""

    stage: str  # what verl is doing
    step: int  # number of training steps done
    total_steps: int | None  # None while it is unknown
    seconds: float  # since the start


def verl_command(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command a user would type to run a recipe's YAML with Hydra overrides."""
    recipe = ["--config-dir", str(config.parent), "--config-name", config.stem]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *recipe, *overrides]


def run_verl(
    config: Path,
    overrides: Sequence[str],
    folder: Path,
    on_progress: Callable[[Progress], None],
    goes_on: bool = False,
    threads: int | None = None,
) -> float:
    """Run verl to its end; return the wall-clock seconds of this start.

    The new folder gets `train.log`, `metrics.jsonl` and Hydra's own files. A run that goes on may have the folder of a
    start which was interrupted: what is left of its processes ends, and the next log is `train-2.log`. Progress is told
    about twice a second. `threads` is the `OMP_NUM_THREADS` of all processes, where the variable is not set.

    Raises:
        RunFailedError: If verl fails; Ray's logs are kept then and named.
        KeyboardInterrupt: On Ctrl-C, SIGTERM and SIGHUP, after every process of the run has ended.
    """
    folder.mkdir(parents=True, exist_ok=goes_on)
    starts = len(list(folder.glob("train*.log")))
    log, metrics = folder / (f"train-{starts + 1}.log" if starts else "train.log"), folder / "metrics.jsonl"
    mark = uuid.uuid5(uuid.NAMESPACE_URL, folder.resolve().as_uri()).hex  # the same at each start of this run
    end_marked(mark)
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment |= {"VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONUNBUFFERED": "1"}
    start, process, python = time.monotonic(), None, os.environ.get(WORKER_PYTHON)
    with ended_by_signals(), scratch_folder("vp-ray-", mark) as ray_folder:
        environment |= {RUN_MARK: f"{mark}-{ray_folder.name}", "VLLM_RPC_BASE_PATH": str(ray_folder)}  # of its sockets
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
            _follow(process, log, metrics, start, on_progress)
        finally:
            end_processes(process, mark)
        if process.returncode != 0:
            (ray_folder / _MARK).unlink()  # so that it stays
    if process.returncode != 0:
        why = f"verl ended with exit code {process.returncode}:\n{reason(log, process.returncode)}"
        raise RunFailedError(f"{why}\nLog: {log}\nRay's own logs: {ray_folder}/session_latest/logs")
    return time.monotonic() - start


def _follow(
    process: subprocess.Popen, log: Path, metrics: Path, start: float, on_progress: Callable[[Progress], None]
) -> None:
    stage, total = -1, None
    former = metrics.stat().st_mtime_ns if metrics.exists() else None  # rows of an earlier start: no progress yet
    with log.open(errors="replace") as lines:
        while True:
            ended = process.poll() is not None
            for line in lines:
                stage = stage_of(line, stage)
                if match := TOTAL_STEPS.search(line):
                    total = int(match.group(1))
            written = metrics.exists() and metrics.stat().st_mtime_ns != former
            step = metrics.read_bytes().count(b"\n") if written else 0
            text = "training" if step else STAGES[stage][1] if stage >= 0 else "starting verl"
            on_progress(Progress(text, step, total, time.monotonic() - start))
            if ended:
                return
            time.sleep(_POLL_SECONDS)


def stage_of(line: str, current: int) -> int:
    """Return the index of the furthest stage that a line of the log shows, at least `current` (-1: none yet)."""
    reached = (index for index in range(len(STAGES) - 1, current, -1) if re.search(STAGES[index][0], line))
    return next(reached, current)


@contextlib.contextmanager
def scratch_folder(prefix: str, mark: str = "") -> Iterator[Path]:
    """Yield a new folder for temporary files; it is removed at the end, unless it has lost its file `mark` by then.

    First go the folders that killed processes have left, with the processes that carry the mark and the folder's name.
    """
    parent = Path(tempfile.gettempdir())
    if re.search(r"[^ -~]|[*?\[]", str(parent)):  # Ray takes ASCII alone, and finds no logs where * means something
        parent = Path("/tmp")
    for left in (file.parent for file in parent.glob(f"{prefix}*/{_MARK}")):
        with contextlib.suppress(OSError):  # somebody else removes it, or has it on a file system without locks
            if left.lstat().st_uid == os.getuid() and take(left, needs_locks=True) is None:
                try:
                    if own := (left / _MARK).read_text():  # every mark begins with an empty one
                        end_marked(f"{own}-{left.name}")
                finally:  # also if its owner has just removed it, and it was made again
                    _remove(left)
    # Short, because Ray puts UNIX sockets into it and their paths are limited to 107 bytes.
    folder, kept = parent / f"{prefix}{secrets.token_hex(4)}", False
    try:
        folder.mkdir(mode=0o700)
        take(folder)
        (folder / _MARK).write_text(mark)  # there only once the folder is locked
        yield folder
        kept = not (folder / _MARK).exists()
    finally:
        if not kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # sockets of processes that are closing may vanish under us
    release(folder)


def end_processes(process: subprocess.Popen | None, mark: str, grace_seconds: float = _GRACE_SECONDS) -> None:
    """End the driver, which has some seconds to end by itself, and every process that carries its run's mark."""
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    end_marked(mark)


def end_marked(mark: str) -> None:
    """End every process that carries a mark which begins so: asked first, then killed; and remove verl's sockets."""
    for end in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        if not (left := marked_processes(mark)):  # asked again: one of them may have started others
            break
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself: what was wanted
                end(survivor)
        psutil.wait_procs(left, timeout=_ASKED_SECONDS)
    for socket in Path("/tmp").glob(f"rl-colocate-zmq-{mark[:12]}-*"):
        socket.unlink(missing_ok=True)


def marked_processes(mark: str = "") -> list[psutil.Process]:
    """Return the live processes whose environment carries a mark that begins so."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        carried = (process.info["environ"] or {}).get(RUN_MARK)  # None: another user's, which is not ours
        if carried is not None and carried.startswith(mark) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
