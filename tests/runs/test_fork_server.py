"""Workers forked from a template are what Ray would have started: same arguments, environment, streams, exit code."""

import json
import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from verl_precision.runs.fork_server import ForkServer

SCRIPT = """
import json, os, random, sys
import numpy
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(),
    "preloaded": "decimal" in sys.modules, "random": [random.random(), float(numpy.random.rand())],
    "name": __name__,
}), flush=True)
exec(sys.argv[1])
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer(modules=("decimal", "numpy")) as server:
        yield server


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "a script.py"
    path.write_text(SCRIPT)
    return str(path)


def start(server, *arguments, **environment) -> subprocess.Popen:
    # As Ray does: through a shell.
    command = f"exec {server.executable} {shlex.join(arguments)}"
    return subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
    )


def report(process: subprocess.Popen) -> dict:
    """Return what the script says first."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def whole(process: subprocess.Popen) -> tuple[dict, str, str]:
    """Wait for the end; return what the script said first, the rest of its output, and its errors."""
    output, errors = process.communicate(timeout=60)
    first, _, rest = output.partition("\n")
    return json.loads(first), rest, errors


def test_it_runs_as_python_would(server, script, tmp_path):
    process = start(server, script, "print('done')", "second", RANK="3", OF_THIS_RUN="yes")
    seen, rest, _ = whole(process)
    assert rest == "done\n" and process.returncode == 0
    assert seen["arguments"] == [script, "print('done')", "second"] and seen["name"] == "__main__"
    assert seen["environment"]["RANK"] == "3" and seen["environment"]["OF_THIS_RUN"] == "yes"
    assert seen["cwd"] == os.getcwd() and seen["preloaded"] and seen["pid"] != process.pid


def test_one_template_an_environment_but_for_what_tells_workers_apart(server, script):
    """A module may read any variable as it is imported, so that it must see the worker's."""
    parent = "import psutil; print(psutil.Process().ppid())"
    templates = {}
    for name, environment in {
        "first": {"RANK": "0"},
        "another rank": {"RANK": "1"},
        "another setting": {"VERL_LOGGING_LEVEL": "DEBUG"},
    }.items():
        templates[name] = whole(start(server, script, parent, **environment))[1]
    assert templates["first"] == templates["another rank"] != templates["another setting"]


def test_exit_code_error_and_random_state_are_its_own(server, script):
    first, second = start(server, script, "sys.exit(7)"), start(server, script, "raise ValueError('why')")
    (one, _, _), (other, _, errors) = whole(first), whole(second)
    assert not set(one["random"]) & set(other["random"])
    assert first.returncode == 7
    assert "ValueError: why" in errors and second.returncode == 1


def test_signals_reach_it(server, script):
    process = start(server, script, "import time; time.sleep(600)")
    forked = psutil.Process(report(process)["pid"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert not forked.is_running() or forked.status() == psutil.STATUS_ZOMBIE


def test_it_is_killed_with_the_process_that_stands_for_it(server, script):
    process = start(server, script, "import time; time.sleep(600)")
    forked = psutil.Process(report(process)["pid"])
    process.kill()
    process.wait(60)
    assert psutil.wait_procs([forked], timeout=60)[1] == []
    assert start(server, script, "pass").wait(60) == 0, "the template goes on"


def test_a_module_that_cannot_be_imported_is_an_error_with_its_traceback(script):
    with ForkServer(modules=("no_such_module",)) as server:
        process = start(server, script, "pass")
        assert "No module named 'no_such_module'" in process.communicate(timeout=60)[1]
        assert process.returncode == 1


def test_templates_end_with_their_server(script):
    with ForkServer(modules=("decimal",)) as server:
        process = start(server, script, "import psutil; print(psutil.Process().ppid())")
        template = psutil.Process(int(whole(process)[1]))
        assert template.is_running()
    assert psutil.wait_procs([template], timeout=60)[1] == []


def test_a_template_without_work_ends_and_the_next_process_starts_another(script):
    parent = "import psutil; print(psutil.Process().ppid())"
    with ForkServer(modules=("decimal",), idle_seconds=0.0) as server:
        first = psutil.Process(int(whole(start(server, script, parent))[1]))
        assert psutil.wait_procs([first], timeout=60)[1] == []
        assert int(whole(start(server, script, parent))[1]) != first.pid


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
    with ForkServer(modules=("ray._private.services", "torch")) as server:
        done = subprocess.run(
            [sys.executable, str(script), server.executable],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment | {"RAY_TMPDIR": str(tmp_path)[:40]},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("threads")]
    assert lines == ["threads 1 1", "threads 2 2"], done.stdout + done.stderr
