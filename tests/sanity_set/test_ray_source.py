"""Two engines as Ray actors on this machine, on logical GPUs: every request comes back once."""

import pytest

from verl_precision.errors import EnvironmentMismatchError
from verl_precision.sanity_set.ray_source import RaySource
from verl_precision.sanity_set.source import Request, Response


class Echo:
    """An engine that gives back two responses a time."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def submit(self, requests):
        self._waiting += requests

    def poll(self):
        ready, self._waiting = self._waiting[:2], self._waiting[2:]
        return [Response(r.problem, r.response, "text", 1) for r in ready]

    def close(self):
        pass


def test_requests_come_back_once_from_two_engines():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(EnvironmentMismatchError, match="Allowed: 1 to 2"):
            RaySource(Echo, "local", engines=3)
        source = RaySource(Echo, "local", engines=None)
        assert source.engines == 2
        wanted = {(str(problem), index) for problem in range(5) for index in range(3)}
        source.submit([Request(problem, index, (), 1, 0) for problem, index in sorted(wanted)])
        back = []
        while len(back) < len(wanted):
            responses = source.poll()
            assert responses
            back += [(response.problem, response.response) for response in responses]
        assert sorted(back) == sorted(wanted)
        assert source.poll() == []
        source.close()
        assert ray.is_initialized()  # somebody else's: left running
    finally:
        ray.shutdown()
