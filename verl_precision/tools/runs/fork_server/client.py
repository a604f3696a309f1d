"""Replaces `python` when Ray starts a worker: a template process that has imported everything forks the worker.

    python -I -S client.py FOLDER [-u] [-B] (SCRIPT | -m MODULE) [ARGUMENT ...]

It starts the template of this environment if there is none. Then it passes signals on to the forked process, and ends
with the fork's exit code. If this process is killed, the fork is killed, too.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

# Variables that differ between workers or between runs, and that no module reads during its import. (Ray reads
# RAY_JOB_ID and RAY_RAYLET_PID on import: the first is the same in each new Ray, the second is the template's.)
OWN = (
    *("RAY_RAYLET_PID", "RAY_LOCAL_WORLD_SIZE", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WG_BACKEND", "WG_PREFIX"),
    *("VERL_FILE_LOGGER_PATH", "VERL_PRECISION_RUN", "VERL_PRECISION_TEST", "PYTEST_CURRENT_TEST"),
    *("VERL_PRECISION_WEIGHT_SOCKET", "VLLM_RPC_BASE_PATH", "SHLVL", "PWD", "OLDPWD", "_"),
)
_START_SECONDS, _POLL_SECONDS = 300.0, 0.05


def connect(folder: str) -> socket.socket:
    """Return a connection to the template of this environment, which is started if there is none."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    name = os.path.join(folder, hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16])
    # A template takes this lock before it ends for lack of work, so that none ends between these lines.
    with open(f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{name}.sock"):
            _start_template(folder, name, environment)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"{name}.sock")
    return connection


def _start_template(folder: str, name: str, environment: dict[str, str]) -> None:
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "template.py"), folder, name]
    with open(f"{name}.log", "wb") as log:
        template = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    end = time.monotonic() + _START_SECONDS
    while not os.path.exists(f"{name}.sock"):
        if template.poll() is not None or time.monotonic() > end:
            template.kill()
            with open(f"{name}.log", errors="replace") as log:
                sys.exit(f"the template for Ray's workers did not start; its log:\n{log.read()}")
        time.sleep(_POLL_SECONDS)


def main() -> int:
    """Let a template fork the process; return its exit code when the process has ended."""
    folder, arguments = sys.argv[1], sys.argv[2:]
    while arguments[0] in ("-u", "-B"):
        del arguments[0]
    connection = connect(folder)
    answers = connection.makefile("rb")
    # One line of JSON, with the standard streams. The template answers with two lines: process id, exit code.
    message = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n"
    sent = socket.send_fds(connection, [message], [0, 1, 2])
    if rest := message[sent:]:  # an empty send fails if the process has already ended
        connection.sendall(rest)
    forked = _number(answers)

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended; its exit code is on its way
            os.kill(forked, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = _number(answers)
    if code < 0:  # a signal ended the process: end this process by the same signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _number(answers) -> int:
    return int(answers.readline() or sys.exit("the template for Ray's workers has ended; its log is beside its socket"))


if __name__ == "__main__":
    sys.exit(main())
