"""Two engines as Ray actors on this machine, on logical GPUs: every request comes back once."""

from functools import partial

import pytest

from verl_precision.errors import EnvironmentMismatchError, RunFailedError
from verl_precision.sampling.engine import Request
from verl_precision.sampling.ray_engines import RayEngines
from verl_precision.sanity_set.recorded import RecordedEngine


def test_requests_come_back_once_from_two_engines(tmp_path, write_rows):
    ray = pytest.importorskip("ray")
    wanted = sorted((str(problem), index) for problem in range(5) for index in range(3))
    lines = [{"problem": problem, "response": index, "tokens": 1, "correct": True} for problem, index in wanted]
    build = partial(RecordedEngine, write_rows(tmp_path / "recorded.jsonl", lines))
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(EnvironmentMismatchError, match="Allowed: 1 to 2"):
            RayEngines(build, "local", engines=3)
        with pytest.raises(RunFailedError, match=r"(?s)an engine on Ray failed.*FileNotFoundError"):
            RayEngines(partial(RecordedEngine, tmp_path / "nowhere.jsonl"), "local", engines=1)
        engine = RayEngines(build, "local", engines=None)
        assert engine.engines == 2
        back = []
        for share in (wanted[:9], wanted[9:]):  # a second one while the first is out
            engine.submit([Request(problem, index, (), 1, 0) for problem, index in share])
        while len(back) < len(wanted):
            responses = engine.poll()
            assert responses
            back += [(response.problem, response.response) for response in responses]
        assert sorted(back) == wanted
        assert engine.poll() == []
        engine.close()
        assert ray.is_initialized()  # somebody else's: left running
    finally:
        ray.shutdown()
