"""An engine in its own process: it answers, its failure is named, and it does not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from verl_precision.errors import RunFailedError
from verl_precision.sampling.engine import Request, Response
from verl_precision.sampling.engine_process import EngineProcess


class Echo:
    """Answers each request with this process's number; a prompt of -1 makes it fail, the first of -2 sleep."""

    engines = 1

    def __init__(self, fail=False):
        if fail:
            raise MemoryError("the model is too large")
        self.asked = []

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        request = self.asked.pop(0)
        if request.prompt_token_ids == (-1,):
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt_token_ids == (-2,):
            time.sleep(600)
        return [Response(request.problem, request.response, os.getpid())]

    def close(self):
        """Nothing is held."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start an engine whose class is in this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    started = []

    def make(**arguments):
        started.append(EngineProcess(partial(Echo, **arguments), "score-fp16", tmp_path / "logs"))
        return started[-1]

    yield make
    for process in started:
        process.close()


def request(response, token=0):
    return Request("a", response, (token,))


def test_answers_come_from_another_process_that_ends_when_closed(start, tmp_path):
    engine = start()
    assert engine.poll() == [], "nothing was asked"
    engine.submit([request(0), request(1)])
    first = engine.poll()
    engine.submit([request(2)])
    back = first + engine.poll() + engine.poll()
    assert [response.response for response in back] == [0, 1, 2] and engine.poll() == []
    (number,) = {response.tokens for response in back}
    assert number != os.getpid()
    engine.close()
    assert not psutil.pid_exists(number)


def test_a_failure_is_named_with_its_log_which_is_kept(start, tmp_path):
    words = r"(?s)the process score-fp16 ended with exit code 1; .*MemoryError.*Log: .*score-fp16-{}.log"
    for number in range(2):
        with pytest.raises(RunFailedError, match=words.format(number)):
            engine = start(fail=True)
            engine.submit([request(0)])
            engine.poll()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["score-fp16-0.log", "score-fp16-1.log"]


def test_a_process_that_is_killed_is_named(start):
    engine = start()
    engine.submit([request(0, -1)])
    with pytest.raises(RunFailedError, match=r"(?s)exit code -9.*SIGKILL"):
        engine.poll()


def test_ends_with_its_parent_even_at_work(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
from functools import partial
from pathlib import Path
from test_engine_process import Echo, EngineProcess, request
engine = EngineProcess(partial(Echo), "score", Path({str(tmp_path)!r}))
engine.submit([request(0), request(1, -2)])
print(engine.poll()[0].tokens, flush=True)
time.sleep(600)
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs([engine], timeout=30)[1] == []
