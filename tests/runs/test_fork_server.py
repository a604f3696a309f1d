"""Workers forked from a template are what Ray would have started: same arguments, environment, streams, exit code."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from verl_precision.runs.fork_server import fork_server

# Says what it is, then executes its first argument.
SCRIPT = """
import json, os, random, sys
import numpy
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(),
    "preloaded": "decimal" in sys.modules, "random": [random.random(), float(numpy.random.rand())],
    "name": __name__, "parent": os.getppid(),
}), flush=True)
exec(sys.argv[1])
"""
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def python():
    with fork_server(modules=("decimal", "numpy")) as python:
        yield python


@pytest.fixture
def start(python, tmp_path):
    """Start the script as Ray does: through a shell."""
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)

    def run(*arguments: str, python: str = python, **environment: str) -> subprocess.Popen:
        command = ["bash", "-c", f"exec {python} {shlex.join([str(script), *arguments])}"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={"PATH": os.environ["PATH"], **environment}, **streams)

    return run


def report(process: subprocess.Popen) -> dict:
    """Return what the script says first."""
    return json.loads(process.stdout.readline())


def whole(process: subprocess.Popen) -> tuple[dict, str, str]:
    """Wait for the end; return what the script said first, the rest of its output, and its errors."""
    output, errors = process.communicate(timeout=60)
    first, _, rest = output.partition("\n")
    return json.loads(first), rest, errors


def test_it_runs_as_python_would(start, tmp_path):
    process = start("print('done')", "second", RANK="3", OF_THIS_RUN="yes" * 40_000)
    seen, rest, _ = whole(process)
    assert rest == "done\n" and process.returncode == 0
    assert seen["arguments"] == [str(tmp_path / "a script.py"), "print('done')", "second"]
    assert seen["name"] == "__main__" and seen["cwd"] == os.getcwd()
    assert seen["environment"]["RANK"] == "3" and len(seen["environment"]["OF_THIS_RUN"]) == 120_000
    assert seen["preloaded"] and seen["pid"] != process.pid


def test_one_template_an_environment_but_for_what_tells_workers_apart(start):
    """A module may read any variable as it is imported, so that it must see the worker's."""
    settings = ({"RANK": "0"}, {"RANK": "1"}, {"VERL_LOGGING_LEVEL": "DEBUG"})
    first, other_rank, other_setting = (whole(start("", **setting))[0]["parent"] for setting in settings)
    assert first == other_rank != other_setting


def test_exit_code_error_and_random_state_are_its_own(start):
    first, second = start("sys.exit(7)"), start("raise ValueError('why')")
    (one, _, _), (other, _, errors) = whole(first), whole(second)
    assert not set(one["random"]) & set(other["random"])
    assert first.returncode == 7
    assert "ValueError: why" in errors and second.returncode == 1


def test_signals_reach_it(start):
    process = start(SLEEP)
    forked = psutil.Process(report(process)["pid"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE


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
    assert whole(start(""))[0]["parent"] == seen["parent"]


def test_a_module_that_cannot_be_imported_is_an_error_with_its_traceback(start):
    with fork_server(modules=("no_such_module",)) as python:
        process = start("", python=python)
        assert "No module named 'no_such_module'" in process.communicate(timeout=60)[1]
        assert process.returncode == 1


def test_templates_end_with_their_server(start):
    with fork_server(modules=("decimal",)) as python:
        template = psutil.Process(whole(start("", python=python))[0]["parent"])
        assert template.is_running()
    assert psutil.wait_procs([template], timeout=60)[1] == []


def test_a_template_without_work_ends_and_the_next_process_starts_another(start):
    with fork_server(modules=("decimal",), idle_seconds=0.0) as python:
        first = psutil.Process(whole(start("", python=python))[0]["parent"])
        assert psutil.wait_procs([first], timeout=60)[1] == []
        assert whole(start("", python=python))[0]["parent"] != first.pid


def test_torch_follows_the_number_of_threads_that_ray_sets(tmp_path):
    """Ray sets OMP_NUM_THREADS when an actor is made; a worker that it starts imports torch later and reads it."""
    script = tmp_path / "actor.py"
    script.write_text(
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, runtime_env={'py_executable': sys.argv[1]})\n"
        "@ray.remote\n"
        "class Actor:\n"
        "    def threads(self):\n"
        "        import os, torch\n"
        "        return os.environ['OMP_NUM_THREADS'], torch.get_num_threads()\n"
        "for cpus in (1, 2):\n"
        "    print('threads', *ray.get(Actor.options(num_cpus=cpus).remote().threads.remote()))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["RAY_TMPDIR"] = str(tmp_path)[:40]
    with fork_server(modules=("ray._private.services", "torch")) as python:
        command = [sys.executable, str(script), python]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("threads")]
    assert lines == ["threads 1 1", "threads 2 2"], done.stdout + done.stderr
