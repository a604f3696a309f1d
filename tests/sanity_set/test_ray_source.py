"""Two engines as Ray actors on this machine, on logical GPUs: every request comes back once."""

from functools import partial

import pytest

from verl_precision.errors import EnvironmentMismatchError
from verl_precision.sanity_set.ray_source import RaySource
from verl_precision.sanity_set.source import RecordedSource, Request


def test_requests_come_back_once_from_two_engines(tmp_path, write_rows):
    ray = pytest.importorskip("ray")
    wanted = sorted((str(problem), index) for problem in range(5) for index in range(3))
    lines = [{"problem": problem, "response": index, "tokens": 1, "correct": True} for problem, index in wanted]
    build = partial(RecordedSource, write_rows(tmp_path / "recorded.jsonl", lines))
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(EnvironmentMismatchError, match="Allowed: 1 to 2"):
            RaySource(build, "local", engines=3)
        source = RaySource(build, "local", engines=None)
        assert source.engines == 2
        back = []
        for share in (wanted[:9], wanted[9:]):  # a second one while the first is out
            source.submit([Request(problem, index, (), 1, 0) for problem, index in share])
        while len(back) < len(wanted):
            responses = source.poll()
            assert responses
            back += [(response.problem, response.response) for response in responses]
        assert sorted(back) == wanted
        assert source.poll() == []
        source.close()
        assert ray.is_initialized()  # somebody else's: left running
    finally:
        ray.shutdown()
