"""The processes of a run: known by a mark in their environment, and ended all of them, whoever started them."""

import contextlib
import signal
import subprocess

import psutil

# Every process of a run carries this variable, so that exactly those are ended.
RUN_MARK = "VERL_PRECISION_RUN"
_GRACE_SECONDS = 20


def end_processes(process: subprocess.Popen, mark: str, grace_seconds: float = _GRACE_SECONDS) -> None:
    """End the driver and every process of its run: asked first, then killed.

    Args:
        process: The driver.
        mark: Value of `RUN_MARK` in the environment of the run's processes.
        grace_seconds: How long the driver may take to end by itself.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    end_marked(mark)


def end_marked(mark: str) -> None:
    """End every process whose environment carries the mark: asked first, then killed."""
    left = marked_processes(mark)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself: what was wanted
                end(survivor)
        _, left = psutil.wait_procs(left, timeout=5)


def marked_processes(mark: str | None = None) -> list[psutil.Process]:
    """Return the live processes whose environment carries the mark, or with None any run's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            carried = process.environ().get(RUN_MARK)
            if carried is not None and mark in (None, carried) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile, or another user's: not ours
            continue
    return found
