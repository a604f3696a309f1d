"""A step of RL with gated delta nets; the guard on them: tests/weight_sync/test_this_years_models.py."""

import pytest

PADDED = "actor_rollout_ref.model.use_remove_padding=False"  # packed-delta-nets


@pytest.mark.matrix
def test_a_step_of_rl_with_gated_delta_nets(run_quickstart):
    (row,) = run_quickstart("tiny_architecture=qwen3_next", "precision=bf16", "trainer.total_training_steps=1", PADDED)
    assert row["weight_sync/unverified_layers"] == 0 and row["weight_sync/verified_layers"] > 20
    assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]
    assert row["mismatch/probs_pearson"] > 0.99
