"""Workers forked from a template are what Ray would have started: same arguments, environment, streams, exit code."""

import json
import os
import shlex
import signal
import socket
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest

from verl_precision.integration.rollout.weight_socket import VARIABLE as WEIGHT_SOCKET
from verl_precision.tools.runs.fork_server import fork_server

# Says what it is, then executes its first argument.
SCRIPT = """
import json, os, random, sys
import numpy
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(),
    "preloaded": "decimal" in sys.modules, "random": [random.random(), float(numpy.random.rand())],
    "name": __name__, "path": sys.path,
    "template": int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]),
}), flush=True)
exec(sys.argv[1])
"""
SLEEP = "import time; time.sleep(600)"
# Prints how many threads actors of one and of two CPUs have, as Ray says and as torch has.
ACTOR = """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={{"py_executable": {python!r}}})

@ray.remote
class Actor:
    def threads(self):
        import os, torch
        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

for cpus in (1, 2):
    print("threads", *ray.get(Actor.options(num_cpus=cpus).remote().threads.remote()))
"""


@pytest.fixture(scope="module")
def python():
    with fork_server(modules=("decimal", "numpy")) as python:
        yield python


@pytest.fixture
def start(python, tmp_path):
    """Start the script as Ray does: through a shell."""
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)

    def run(*arguments: str, python: str = python, **environment: str) -> Popen:
        command = ["bash", "-c", f"exec {python} {shlex.join([str(script), *arguments])}"]
        return Popen(command, env={"PATH": os.environ["PATH"], **environment}, stdout=PIPE, stderr=PIPE, text=True)

    return run


def report(process: Popen) -> dict:
    """Return what the script says first."""
    return json.loads(process.stdout.readline())


def whole(process: Popen) -> tuple[dict, str, str]:
    """Wait for the end; return what the script said of itself, the rest of its output, and its errors."""
    output, errors = process.communicate(timeout=60)
    said, _, rest = output.partition("\n")
    return json.loads(said), rest, errors


def test_it_runs_as_python_would(start, tmp_path):
    process = start("print('done')", "second", RANK="3", OF_THIS_RUN="yes" * 40_000)
    seen, rest, _ = whole(process)
    assert rest == "done\n" and process.returncode == 0
    assert seen["arguments"] == [str(tmp_path / "a script.py"), "print('done')", "second"]
    assert seen["name"] == "__main__" and seen["cwd"] == os.getcwd()
    assert seen["environment"]["RANK"] == "3" and len(seen["environment"]["OF_THIS_RUN"]) == 120_000
    assert seen["preloaded"] and seen["pid"] != process.pid
    assert seen["path"][0] == str(tmp_path) and not any(path.endswith("verl_precision/runs") for path in seen["path"])


def test_one_template_an_environment_but_for_what_tells_workers_apart(start):
    """A module may read any variable as it is imported, so that it must see the worker's."""
    settings = ({"RANK": "0"}, {"RANK": "1"}, {WEIGHT_SOCKET: "of another run"}, {"VERL_LOGGING_LEVEL": "DEBUG"})
    first, other_rank, other_run, other_setting = (whole(start("", **setting))[0]["template"] for setting in settings)
    assert first == other_rank == other_run != other_setting


def test_exit_code_error_and_random_state_are_its_own(start):
    first, second = start("sys.exit(7)"), start("raise ValueError('why')")
    (one, _, _), (other, _, errors) = whole(first), whole(second)
    assert not set(one["random"]) & set(other["random"])
    assert (first.returncode, second.returncode) == (7, 1) and "ValueError: why" in errors


def test_it_is_killed_with_the_process_that_stands_for_it_and_the_template_goes_on(start, python):
    process = start(SLEEP)
    seen = report(process)
    forked = psutil.Process(seen["pid"])
    process.kill()
    process.wait(60)
    assert psutil.wait_procs([forked], timeout=60)[1] == []
    for path in Path(shlex.split(python)[-1]).glob("[!o]*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:  # killed before it had said anything
            client.connect(str(path))
    assert whole(start(""))[0]["template"] == seen["template"]


def test_a_module_that_cannot_be_imported_is_an_error_with_its_traceback(start):
    with fork_server(modules=("no_such_module",)) as python:
        process = start("", python=python)
        assert "No module named 'no_such_module'" in process.communicate(timeout=60)[1]
        assert process.returncode == 1


def test_a_template_without_work_ends_and_the_next_process_starts_another(start):
    with fork_server(modules=("decimal",), idle_seconds=0.0) as python:
        first = psutil.Process(whole(start("", python=python))[0]["template"])
        assert psutil.wait_procs([first], timeout=60)[1] == []
        assert whole(start("", python=python))[0]["template"] != first.pid


def test_torch_follows_the_number_of_threads_that_ray_sets(run_python, tmp_path, monkeypatch):
    """Ray sets OMP_NUM_THREADS when an actor is made; a worker that it starts imports torch later and reads it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with fork_server(modules=("ray._private.services", "torch")) as python:
        done = run_python(ACTOR.format(python=python), RAY_TMPDIR=str(tmp_path)[:40])
    lines = [line for line in done.stdout.splitlines() if line.startswith("threads")]
    assert lines == ["threads 1 1", "threads 2 2"], done.stdout + done.stderr


def test_no_fork_outlives_a_template_that_is_killed(start):
    with fork_server(modules=("decimal",)) as python:
        seen = report(start(SLEEP, python=python))
        forked = psutil.Process(seen["pid"])
        os.kill(seen["template"], signal.SIGKILL)
        assert psutil.wait_procs([forked], timeout=60)[1] == []
