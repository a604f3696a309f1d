"""Runs the processes: one after the other here, or on every GPU of a Ray cluster; the same function does both."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from verl_precision.compare.failure import reason
from verl_precision.compare.run import RUN_MARK, RunFailedError, end_processes
from verl_precision.errors import EnvironmentMismatchError
from verl_precision.offline.entry import arguments
from verl_precision.offline.plan import Work, split

_POLL_SECONDS = 0.5


def run_work(folder: Path, work: Work, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run one process to its end; its output goes to `<folder>/logs`.

    Args:
        folder: of the analysis.
        work: what is missing.
        on_poll: called about twice a second.

    Raises:
        RunFailedError: if it fails; the message shows the cause in at most ten lines and names the log.
    """
    rollout, first = work.shards[0]
    log = folder / "logs" / f"{work.kind}-{work.dtype}-{rollout}-{first:05d}.log"
    log.parent.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    with log.open("wb") as sink:
        process = subprocess.Popen(
            arguments(work.kind, folder, work.dtype, work.shards),
            stdin=subprocess.PIPE,  # closed by our end, which is then the process's: entry._end_with_parent
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, RUN_MARK: mark},
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            on_poll()
            time.sleep(_POLL_SECONDS)
    finally:
        end_processes(process, mark)
    if process.returncode != 0:
        raise RunFailedError(
            f"the process that was to {work.kind} in {work.dtype} ended with exit code {process.returncode}; what is "
            f"done is kept, and the same command goes on.\n{reason(log, process.returncode)}\nLog: {log}"
        )


def run_here(folder: Path, works: list[Work], on_poll: Callable[[], None]) -> None:
    """Run one process after the other, so that one model is in memory at a time."""
    for work in works:
        run_work(folder, work, on_poll)


def run_on_ray(address: str, folder: Path, works: list[Work], on_poll: Callable[[], None]) -> None:
    """Run on a Ray cluster: each work is dealt to all GPUs, one process a GPU at a time.

    Args:
        address: of the cluster, as `ray.init` takes it.
        folder: on storage that every node sees at this path.
        works: what is missing.
        on_poll: called about twice a second.

    Raises:
        EnvironmentMismatchError: if there is no such cluster, or it has no GPU.
        RunFailedError: if a process fails; the others are ended.
    """
    import ray

    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise EnvironmentMismatchError(
            f"--ray-address {address}: no Ray cluster answers there ({error}). Allowed: auto, or host:port of a "
            "running cluster. Start one with `ray start --head`, or leave --ray-address out."
        ) from error
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus < 1:
            raise EnvironmentMismatchError(
                f"--ray-address {address}: the cluster has no GPU. Allowed: a cluster with GPUs; without --ray-address "
                "everything runs on this machine."
            )
        remote = ray.remote(num_gpus=1, max_retries=0)(run_work)
        pending = [remote.remote(folder, part) for work in works for part in split(work, gpus)]
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_POLL_SECONDS)
                on_poll()
                ray.get(done)
        finally:
            for task in pending:
                ray.cancel(task, force=True)
    except ray.exceptions.RayTaskError as error:
        raise RunFailedError(str(error.cause)) from error
    finally:
        ray.shutdown()
