"""A step of RL with models of this year; the guard on them: tests/weight_sync/test_witnesses.py."""

import pytest

PADDED = "actor_rollout_ref.model.use_remove_padding=False"  # packed-delta-nets
STATE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.mamba_ssm_cache_dtype=float32"


@pytest.mark.matrix
@pytest.mark.parametrize(("architecture", "settings"), [("qwen3_next", [PADDED, STATE]), ("glm4", []), ("gemma3", [])])
def test_a_step_of_rl(run_quickstart, architecture, settings):
    asked = (f"tiny_architecture={architecture}", "precision=bf16", "trainer.total_training_steps=1", *settings)
    (row,) = run_quickstart(*asked)
    assert row["weight_sync/unverified_layers"] == 0 and row["weight_sync/verified_layers"] > 20
    assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]
    assert row["mismatch/probs_pearson"] > 0.99
