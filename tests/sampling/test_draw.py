"""The loop asks for everything once, keeps engines full, and counts what comes back."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from verl_precision.sampling.draw import work_through
from verl_precision.sampling.engine import Request, Response


class Slow:
    """Two engines that answer a few requests at a time, the last ones first."""

    engines = 2

    def __init__(self, batch):
        self.batch, self.asked, self.most = batch, [], 0

    def submit(self, requests):
        self.asked += requests
        self.most = max(self.most, len(self.asked))

    def poll(self):
        ready = [self.asked.pop() for _ in range(min(self.batch, len(self.asked)))]
        return [Response(request.problem, request.response, 0) for request in ready]


@given(count=st.integers(0, 60), batch=st.integers(1, 9), in_flight=st.integers(1, 20))
def test_everything_once_and_engines_are_kept_full(count, batch, in_flight):
    requests = [Request(str(index % 7), index, ()) for index in range(count)]
    engine, waiting, back, calls = Slow(batch), iter(requests), [], []

    def next_requests(limit):
        return list(islice(waiting, limit))

    def record(response):
        back.append((response.problem, response.response))

    work_through(engine, next_requests, record, lambda: len(back) == count, in_flight, lambda: calls.append(len(back)))
    assert sorted(back) == sorted((request.problem, request.response) for request in requests)
    assert engine.most == min(2 * in_flight, count)
    assert calls == sorted(calls) and (not calls or calls[-1] == count)
