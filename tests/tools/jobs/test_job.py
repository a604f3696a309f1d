"""The loop asks for everything once, keeps an engine full, and shows what comes back."""

import io
import itertools
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.jobs import job
from verl_precision.tools.jobs.job import Job, Tasks, work_through
from verl_precision.tools.jobs.settings import MismatchJob


class Slow:
    """Answers a few requests at a time, the last ones first."""

    def __init__(self, batch):
        self.batch, self.asked, self.most, self.total, self.closed = batch, [], 0, 0, False

    def submit(self, requests):
        self.asked += requests
        self.total += len(requests)
        self.most = max(self.most, len(self.asked))

    def poll(self):
        ready = [self.asked.pop() for _ in range(min(self.batch, len(self.asked)))]
        return [Response(request.problem, request.response, 0) for request in ready]

    def close(self):
        self.closed = True


class Known(Tasks):
    def __init__(self, keys, finished):
        self.keys, self.back = keys, finished
        super().__init__("came back", keys, finished)

    def _request(self, problem, response):
        return SampleRequest(problem, response, ())

    def record(self, response):
        self.back.append((response.problem, response.response))


@given(count=st.integers(1, 60), batch=st.integers(1, 9), in_flight=st.integers(1, 20))
def test_everything_once_and_the_engine_is_kept_full(count, batch, in_flight):
    engine, work = Slow(batch), Known([(str(index % 7), index) for index in range(count)], [])
    work_through(engine, work, in_flight, Console(quiet=True))
    assert sorted(work.back) == sorted(work.keys)
    assert engine.most == min(in_flight, count)


def test_an_engine_starts_for_what_is_unfinished_alone_and_is_closed(monkeypatch):
    keys = [("a", 0), ("a", 1), ("b", 0)]
    half, done, engine = Known(keys, keys[1:2]), Known(keys, list(keys)), Slow(2)
    start = Mock(return_value=engine)
    monkeypatch.setattr(job, "EngineProcess", start)
    under_way = Job(MismatchJob(in_flight=4), Console(quiet=True))
    under_way.complete("made up", [done], Mock())
    start.assert_not_called()
    under_way.complete("made up", [done, half, Known(keys, [])], Mock())
    assert half.missing == [("a", 0), ("b", 0)] and sorted(half.back) == keys
    start.assert_called_once()
    assert engine.total == 2 + 3 and engine.closed


def test_progress_is_said_each_minute(monkeypatch):
    clock = itertools.count(step=7)
    monkeypatch.setattr(job.time, "monotonic", lambda: next(clock))
    seen = io.StringIO()
    work_through(Slow(1), Known([(str(index), 0) for index in range(20)], []), 20, Console(file=seen))
    lines = seen.getvalue().splitlines()
    assert 2 < len(lines) < 15 and lines[-1] == "20/20 came back"
