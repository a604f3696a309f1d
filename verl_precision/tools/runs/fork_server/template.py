"""A process that has imported what verl's workers import, and forks one for each `client.py` that asks.

    python template.py FOLDER NAME  # NAME: of its socket and lock, without the suffix

Importing verl, vLLM and torch takes ten seconds of a core, and a run has eleven processes that do it. A fork has them
at once and shares their memory; what may differ between processes is set in it (`_become`). The template ends when the
process that owns FOLDER does, or for want of work: each of many environments has one of half a gigabyte.
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
    """Fork on request until the owner has gone or there is no work; return in each process ordered its arguments."""
    with open(os.path.join(folder, "template.json")) as file:
        settings = json.load(file)
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    owner.connect(os.path.join(folder, "owner.sock"))
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())  # SIGIO ends this process with its owner, while it imports, too
    fcntl.fcntl(owner, fcntl.F_SETFL, fcntl.fcntl(owner, fcntl.F_GETFL) | os.O_ASYNC)
    # Ray reads it as it is imported, and ends a worker whose raylet has ended; here, whose template has.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    for module in settings["modules"]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that the collector of a fork leaves shared pages alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    template = os.getpid()
    listening.bind(f"{name}.new")
    listening.listen(64)
    os.rename(f"{name}.new", f"{name}.sock")  # there only once it answers
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
    """Have the kernel kill this process when its parent ends: none is left when the template is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ordered(client: socket.socket) -> list[str]:
    """Fork the process that a client orders, in which this returns, and keep it: tell its id and its exit code."""
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
    """Give a fresh fork what a process has from its starter, and what no two processes share."""
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
    """Have torch follow OMP_NUM_THREADS where Ray sets it: it is there already, and has read the variable."""
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
    del sys.path[0]  # this file's folder, which a fork has no business in
    run(serve(sys.argv[1], sys.argv[2]))
