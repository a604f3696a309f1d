"""An engine in its own process: it answers, its failure is named, and it does not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from functools import partial

import psutil
import pytest

from verl_precision.base.errors import RunFailedError
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.engines.engine_process import EngineProcess

DIE, SLEEP = -1, -2  # prompts


class Echo:
    """Answers each request with this process's number, or does what the prompt says."""

    def __init__(self, fail=False):
        if fail:
            raise MemoryError("the model is too large")
        self.asked = []

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        request = self.asked.pop(0)
        if request.prompt_token_ids == (DIE,):
            os.kill(os.getpid(), signal.SIGKILL)
        if request.prompt_token_ids == (SLEEP,):
            time.sleep(600)
        return [Response(request.problem, request.response, os.getpid())]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start an engine whose class is in this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    with ExitStack() as stack:
        logs = tmp_path / "logs"
        yield lambda fail=False: stack.enter_context(closing(EngineProcess(partial(Echo, fail), "score-fp16", logs)))


def request(response, token=0):
    return SampleRequest("a", response, (token,))


def test_answers_come_from_another_process_that_ends_when_closed(start):
    engine = start()
    assert engine.poll() == [], "nothing was asked"
    engine.submit([request(0), request(1)])
    first = engine.poll()
    engine.submit([request(2)])
    back = first + engine.poll() + engine.poll()
    assert [response.response for response in back] == [0, 1, 2] and engine.poll() == []
    (number,) = {response.length for response in back}
    assert number != os.getpid()
    engine.close()
    assert not psutil.pid_exists(number)


def test_failures_are_named_with_their_logs_which_are_kept(start, tmp_path):
    with pytest.raises(RunFailedError, match=r"(?s)score-fp16 ended with exit code 1; .*MemoryError.*score-fp16-0.log"):
        engine = start(fail=True)
        engine.submit([request(0)])
        engine.poll()
    engine = start()
    engine.submit([request(0, DIE)])
    with pytest.raises(RunFailedError, match=r"(?s)exit code -9.*SIGKILL.*score-fp16-1.log"):
        engine.poll()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["score-fp16-0.log", "score-fp16-1.log"]


def test_ends_with_its_parent_even_at_work(tmp_path, monkeypatch):
    script = f"""
import time
from pathlib import Path
from test_engine_process import SLEEP, Echo, EngineProcess, request
engine = EngineProcess(Echo, "score", Path({str(tmp_path)!r}))
engine.submit([request(0), request(1, SLEEP)])
print(engine.poll()[0].length, flush=True)
time.sleep(600)
"""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([engine], timeout=30)[1] == []
