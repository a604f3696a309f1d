"""A process that has imported what verl's workers import, and forks one worker for each request of a `client.py`.

    python template.py FOLDER NAME  # NAME: of its socket and lock, without the suffix

Importing verl, vLLM and torch takes ten seconds of a core, and a run has nine processes that do it. A fork has the
modules at once and shares their memory; `_become` sets what differs between processes. The template ends with the
process that owns FOLDER, or for lack of work: each environment has its own template of half a gigabyte.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def serve(folder: str, name: str) -> list[str]:
    """Fork on request until the owner has ended or there is no work; in each forked worker, return its arguments."""
    with open(os.path.join(folder, "template.json")) as file:
        settings = json.load(file)
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    owner.connect(os.path.join(folder, "owner.sock"))
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())  # SIGIO ends this process with its owner, also during imports
    fcntl.fcntl(owner, fcntl.F_SETFL, fcntl.fcntl(owner, fcntl.F_GETFL) | os.O_ASYNC)
    # Ray reads it on import, and ends a worker whose raylet has ended; here, a worker whose template has ended.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    for module in settings["modules"]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a fork's garbage collector does not copy shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a keeper (`_ordered`)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    template = os.getpid()
    listening.bind(f"{name}.new")
    listening.listen(64)
    os.rename(f"{name}.new", f"{name}.sock")  # it appears when the template can answer
    while True:
        if not select.select([listening], [], [], settings["idle_seconds"])[0]:
            with open(f"{name}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with open(f"/proc/self/task/{template}/children") as children:
                    busy = children.read()
                if not busy and not select.select([listening], [], [], 0)[0]:  # no client has connected meanwhile
                    os.unlink(f"{name}.sock")
                    os._exit(0)
            continue
        client, _ = listening.accept()
        if os.fork() == 0:
            _end_with(template)
            owner.close()
            listening.close()
            with contextlib.suppress(ConnectionError):
                return _ordered(client)
            os._exit(1)  # the client was killed while it sent its order
        client.close()


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, so that none is left if the template is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ordered(client: socket.socket) -> list[str]:
    """Fork the process that a client orders, and return its arguments there; here, send its id and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while not message.endswith(b"\n"):
        if not (part := client.recv(1 << 16)):
            raise ConnectionError
        message += part
    arguments, environment, cwd = json.loads(message)
    keeper, process = os.getpid(), os.fork()
    if process == 0:
        _end_with(keeper)
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _become(environment, cwd)
        return arguments
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"%d\n" % process)
    ended = os.pidfd_open(process)
    if ended not in select.select([client.fileno(), ended], [], [])[0]:  # the client was killed
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(ConnectionError):
        client.sendall(b"%d\n" % code)
    os._exit(0)


def _become(environment: dict[str, str], cwd: str) -> None:
    """Give a new fork the client's environment and folder, and a session and random seeds of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    _follow_thread_count()


def _follow_thread_count() -> None:
    """Let torch follow OMP_NUM_THREADS when Ray sets it: torch is already imported, and has read the variable."""
    torch, ray_utils = (sys.modules.get(name) for name in ("torch", "ray._private.utils"))
    if torch is not None and ray_utils is not None:
        set_variable = ray_utils.set_omp_num_threads_if_unset

        def set_variable_and_threads() -> bool:
            if was_set := set_variable():
                torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            return was_set

        ray_utils.set_omp_num_threads_if_unset = set_variable_and_threads  # type: ignore[attr-defined]


def run(arguments: list[str]) -> None:
    """Run a script or module as `python` would with these arguments."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, from which a fork must not import
    run(serve(sys.argv[1], sys.argv[2]))
