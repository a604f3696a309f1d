"""`explain` on real engines: a healthy BF16 pair is called healthy; a wrong epsilon in vLLM is found, and where."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "explain"))
import planted

from verl_precision.explain.page import advice
from verl_precision.explain.session import explain
from verl_precision.explain.settings import Explanation
from verl_precision.sampling.prompts import read_prompts


@pytest.fixture
def explained(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(planted.__file__).parent))  # a process of an engine imports the fault

    def run(dtype, **engines):
        job = Explanation(
            model="tiny:qwen3", prompts="built-in", rollout_dtype=dtype, train_dtype=dtype, max_response_tokens=32
        )
        result = explain(job, read_prompts(None, "prompt", 6), tmp_path / dtype, Console(file=io.StringIO()), **engines)
        parts = result.allotment.parts
        assert sum(part.k3 for part in parts) == pytest.approx(result.allotment.k3, rel=1e-6)
        assert sum(part.nats for part in parts) == pytest.approx(result.allotment.nats, rel=1e-6)
        assert result.allotment.left_out == 0
        for found in result.operations.values():
            assert found.remainder < 1e-3 * found.nats, "the errors of all operations are the whole difference"
        return result, {finding.station.cause: finding for finding in result.findings}

    return run


def test_bf16_on_both_sides_is_healthy(explained):
    result, by_cause = explained("bf16")
    assert not any(finding.fault for finding in result.findings)
    shares = {cause: result.allotment.share(finding.part) for cause, finding in by_cause.items()}
    assert shares["rollout_precision"] + shares["trainer_precision"] > 0.9
    assert by_cause["engine"].part.size < 2e-6
    assert advice(result)[0].station.cause in ("rollout_precision", "trainer_precision")
    assert all(found.first is None for found in result.operations.values())


def test_another_epsilon_is_found(explained):
    result, by_cause = explained("fp16", vllm=planted.vllm_with_another_epsilon)
    assert [finding.station.cause for finding in result.findings if finding.fault] == ["engine"]
    assert result.allotment.share(by_cause["engine"].part) > 0.99
    in_fp32 = result.operations["rollout_fp32"]
    assert in_fp32.first is not None and in_fp32.first.startswith("input norm (model.layers.0.")
    norms = {"input norm", "post-attention norm", "final norm", "qk norm"}
    assert sum(one.share for one in in_fp32.operations if one.kind in norms) > 0.99
