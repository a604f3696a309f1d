"""A folder has one owner at a time: the process that holds the POSIX lock on the file `owner.txt` in it.

The file has a line for each process that has owned the folder. The kernel removes the lock when the process ends, also
after `kill -9`. Child processes do not inherit the lock. Limits:

* NFS: a lost host keeps its locks until its lease ends (NFSv4, usually 90 seconds) or the host starts again (NFSv3). A
  host that continues to compute without network has lost its lock and does not notice. With the mount option `nolock`
  or `local_lock=all` the lock excludes only processes of the same host.
* On a file system without locks (Lustre without `-o flock`) the lock excludes no process, and a warning is logged.
* The lock ends as soon as its process closes any handle of the file, so only this module may open the file.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from verl_precision.base.files import require_regular
from verl_precision.base.loggers import general as logger
from verl_precision.base.state import MOST_BYTES, read_state

OWNER_FILE = "owner.txt"
LEASE_SECONDS = 180.0  # twice the usual lease of NFSv4
_POLL_SECONDS = 5.0
JOB_ID = "VERL_PRECISION_JOB"  # id of a job that is started again for the same run; set by recipes/launch/rayjob.py
RUN_MARK = "VERL_PRECISION_RUN"  # set in every process of a `compare` run, so that exactly these are ended
_JOB_IDS = (JOB_ID, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: dict[tuple[int, Path], IO[bytes]] = {}  # process and folder -> the locked file; a forked child holds no lock
_one_at_a_time = threading.Lock()  # the kernel's lock does not exclude other threads of this process


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="ignore"))  # a later version may add fields
class Owner:
    """A present or former owner of a folder."""

    host: str
    process: int
    job: str | None  # the id that Slurm, PBS, LSF or the launcher gave
    since: str

    def __str__(self) -> str:
        """Return process, host, job and start time as one text."""
        job = f" (job {self.job})" if self.job else ""
        return f"process {self.process} on {self.host}{job}, since {self.since}"


def this_job() -> str | None:
    """Return the id of this process's job, or None."""
    return next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)


def take(folder: Path, wait_seconds: float = 0.0) -> Owner | None:
    """Create and lock a folder until this process ends or calls `release`; return another process that owns it, if any.

    With `wait_seconds`, try again until that time has passed.
    """
    deadline = time.monotonic() + wait_seconds
    while (owner := _take(folder)) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return owner


def release(folder: Path) -> None:
    """Release a folder if this process owns it."""
    with _one_at_a_time:
        if file := _held.pop(_key(folder), None):
            file.close()


def owned_here(folder: Path) -> bool:
    """Return whether this process owns a folder."""
    return _key(folder) in _held


def owners(folder: Path) -> list[Owner]:
    """Return the owners of a folder, the latest last; incomplete lines are ignored."""
    file, remedy = _held.get(_key(folder)), "Remove it if no run uses this folder."
    text = _text(file) if file else read_state(folder / OWNER_FILE, str, remedy) or ""
    return [owner for line in text.splitlines(keepends=True) if (owner := _owner(line))]


def _take(folder: Path) -> Owner | None:
    with _one_at_a_time:
        if owned_here(folder):
            return _last(_held[_key(folder)])
        folder.mkdir(parents=True, exist_ok=True)
        require_regular(folder / OWNER_FILE)
        file = (folder / OWNER_FILE).open("ab+")  # NFS locks only a file that is open for writing
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                return _last(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            logger.warning("the file system of %s has no file locks: a second run could use it too (%s)", folder, error)
        mine = Owner(socket.gethostname(), os.getpid(), this_job(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        file.write(f"\n{json.dumps(asdict(mine))}\n".encode())  # the last line may have been cut short
        file.flush()
        _held[_key(folder)] = file
        return None


def _text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
    return file.read(MOST_BYTES).decode(errors="replace")


def _owner(line: str) -> Owner | None:
    """Return the owner that a line names; None if the line is incomplete or unreadable."""
    try:
        return Owner(**json.loads(line)) if line.endswith("}\n") else None
    except (ValueError, TypeError, RecursionError):
        return None


def _last(file: IO[bytes]) -> Owner:
    """Return the owner in the last line of a locked file; unknown while the line is missing or unreadable."""
    lines = _text(file).rstrip().splitlines() or [""]
    return _owner(lines[-1] + "\n") or Owner("a host", 0, None, "an unknown time")


def _key(folder: Path) -> tuple[int, Path]:
    return os.getpid(), folder.resolve()
