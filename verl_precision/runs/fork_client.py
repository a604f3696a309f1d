"""Stands in for `python` where Ray starts a worker: has a template process fork one that has imported everything.

    python -I -S fork_client.py FOLDER [-u] (SCRIPT | -m MODULE) [ARGUMENT ...]

It looks for the template that was started in this very environment and starts it if there is none (`fork_template.py`),
hands over its arguments, environment, working directory and standard streams, and then stands for the forked process:
signals are passed on, the exit code is the forked process's, and if this process is killed, the forked one is too.
A run starts it ten times, so it imports only a little of Python's own library.
"""

import fcntl
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

# What differs between the workers of a run, or between runs, and is not read while modules are imported. (Ray reads
# RAY_JOB_ID and RAY_RAYLET_PID when imported: the first is the same in each fresh Ray, the second is the template's.)
OWN = (
    *("RAY_RAYLET_PID", "RAY_LOCAL_WORLD_SIZE", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WG_BACKEND", "WG_PREFIX"),
    *("VERL_FILE_LOGGER_PATH", "VERL_PRECISION_RUN", "VERL_PRECISION_TEST", "PYTEST_CURRENT_TEST"),
    *("SHLVL", "PWD", "OLDPWD", "_"),
)
START_SECONDS = 300.0
_POLL_SECONDS = 0.05


def connect(folder: str) -> socket.socket:
    """Return a connection to this environment's template, which is started if there is none."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
    path = os.path.join(folder, f"{name}.sock")
    # A template that ends for want of work holds this lock too, so that none ends between these lines.
    with open(os.path.join(folder, f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _start_template(folder, name, environment)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
    return connection


def _start_template(folder: str, name: str, environment: dict[str, str]) -> None:
    log_path = os.path.join(folder, f"{name}.log")
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "fork_template.py"), folder, name]
    with open(log_path, "wb") as log:
        template = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    end = time.monotonic() + START_SECONDS
    while not os.path.exists(os.path.join(folder, f"{name}.sock")):
        if template.poll() is not None or time.monotonic() > end:
            template.kill()
            with open(log_path, errors="replace") as log:
                sys.exit(f"the template for Ray's workers did not start; its log:\n{log.read()}")
        time.sleep(_POLL_SECONDS)


def main() -> int:
    """Have the process forked; return its exit code when it has ended."""
    folder, arguments = sys.argv[1], [argument for argument in sys.argv[2:] if argument not in ("-u", "-B")]
    connection = connect(folder)
    # One line of JSON, with the three streams. The template answers with two lines: process id, exit code.
    order = {"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}
    message = json.dumps(order).encode() + b"\n"
    sent = socket.send_fds(connection, [message], [0, 1, 2])
    if rest := message[sent:]:  # sending nothing fails where the process has ended by now
        connection.sendall(rest)
    answers = connection.makefile()
    forked = _number(answers)

    def pass_on(number: int, frame: object) -> None:
        try:
            os.kill(forked, number)
        except ProcessLookupError:  # it has just ended; its exit code is on its way
            pass

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = _number(answers)
    if code < 0:  # ended by a signal: so does this one
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _number(answers: io.TextIOWrapper) -> int:
    line = answers.readline()
    if not line:
        sys.exit("the template for Ray's workers has ended; its log is beside its socket")
    return int(line)


if __name__ == "__main__":
    sys.exit(main())
