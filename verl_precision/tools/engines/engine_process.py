"""An engine in a separate process; when the process ends, all its memory is free.

An engine (`vllm_sampler`, `fsdp_scorer`) has `submit`, which queues requests and returns at once, and `poll`, which
waits until at least one response is ready and returns all ready responses, or none if no request is open.
"""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from verl_precision.base.errors import RunFailedError
from verl_precision.base.owner import RUN_MARK
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.runs.failure_report import reason
from verl_precision.tools.runs.launch import end_processes

_EXIT_SECONDS = 20


class EngineProcess:
    """Runs `build()` in a new process and passes requests and responses through a pipe.

    `submit` and `poll` raise `RunFailedError` if the process has failed; the error shows the cause and names the log.
    """

    def __init__(self, build: Callable[[], Any], name: str, logs: Path) -> None:
        """Start the process and return at once, while the model loads. Each process writes a new log."""
        logs.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._log = next(path for number in count() if not (path := logs / f"{name}-{number}.log").exists())
        self._mark, self._in_flight = uuid.uuid4().hex, 0
        self._connection, theirs = Pipe()
        with theirs, self._log.open("xb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl_precision.tools.engines.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, RUN_MARK: self._mark},
                start_new_session=True,
            )
        self._send(build)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Send requests to the process."""
        self._in_flight += len(requests)
        self._send(list(requests))

    def poll(self) -> list[Response]:
        """Wait until at least one response is ready; return all ready responses, or none if no request is open."""
        if not self._in_flight:
            return []
        try:
            responses = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._failure() from None
        self._in_flight -= len(responses)
        return responses

    def close(self) -> None:
        """End the process and all processes that it started."""
        self._connection.close()
        end_processes(self._process, self._mark)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            raise self._failure() from None

    def _failure(self) -> RunFailedError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)  # the pipe closes a little before the process ends
        end_processes(self._process, self._mark)
        code = self._process.returncode
        return RunFailedError(
            f"the process {self._name} ended with exit code {code}; finished results are kept, and the same command "
            f"continues.\n{reason(self._log, code)}\nLog: {self._log}"
        )


def _serve(connection: Connection) -> None:
    """Build an engine and answer requests until the other end of the pipe closes."""
    build = connection.recv()
    inbox: SimpleQueue = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    engine = build()
    in_flight = 0
    while True:
        while in_flight == 0 or not inbox.empty():
            requests = inbox.get()
            engine.submit(requests)
            in_flight += len(requests)
        responses = engine.poll()
        in_flight -= len(responses)
        connection.send(responses)


def _receive(connection: Connection, inbox: SimpleQueue) -> None:
    """Pass messages on, and end this process when the parent, which holds the other end of the pipe, has ended."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, ConnectionError):
        os._exit(1)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
