"""`verl-precision selftest` on a CPU: a fault that it plants in a run of its own stops that run and is named."""

import json

import pytest
from rich.console import Console

from verl_precision.tools.selftest.session import REPORT, run_selftest


@pytest.mark.parametrize(("fault", "message"), [
    ("lost_tensor", "model.embed_tokens.weight: sent by the trainer, but not received"),
    pytest.param(  # with a real vLLM in tests/weight_sync/test_worker.py
        *("bf16_sender", ".weight: arrived in bfloat16, which has fewer bits than the float16 rollout"),
        marks=pytest.mark.matrix,
    ),
])  # fmt: skip
def test_a_planted_fault_stops_its_run_and_names_a_tensor(tmp_path, own_processes, fault, message):
    (outcome,) = run_selftest(tmp_path, "cpu", [fault], Console())
    assert outcome.status == "passed" and message in str(outcome.figures["message"]), outcome
    assert [one["name"] for one in json.loads((tmp_path / REPORT).read_text())["checks"]] == [fault]
    assert own_processes() == []
