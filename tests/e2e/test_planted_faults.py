"""`verl-precision selftest` on a CPU: a fault that it plants in a run of its own stops that run and is named."""

import json

from rich.console import Console

from verl_precision.tools.selftest.session import REPORT, run_selftest


def test_planted_faults_stop_their_runs_and_name_a_tensor(tmp_path, own_processes):
    done = run_selftest(tmp_path, "cpu", ["lost_tensor", "bf16_sender"], 1, Console())
    outcomes = {outcome.name: outcome for outcome in done}
    assert {outcome.status for outcome in done} == {"passed"}, outcomes
    lost = str(outcomes["lost_tensor"].figures["message"])
    assert "model.embed_tokens.weight: sent by the trainer, never received" in lost
    rounded = str(outcomes["bf16_sender"].figures["message"])
    assert ".weight: arrived in bfloat16, too coarse for a rollout in float16" in rounded
    assert [one["name"] for one in json.loads((tmp_path / REPORT).read_text())["checks"]] == list(outcomes)
    assert own_processes() == []
