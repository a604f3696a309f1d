"""A step of RL with each of this year's architectures; the guard: tests/weight_sync/test_this_years_models.py."""

import pytest

PADDED = "actor_rollout_ref.model.use_remove_padding=False"
EAGER = "++actor_rollout_ref.model.override_config.attn_implementation=eager"


@pytest.mark.matrix
@pytest.mark.parametrize(("architecture", "setting"), [
    ("qwen3_next", PADDED), ("gpt_oss", EAGER), ("glm4", None), ("glm4_moe", None), ("gemma3", None),
])  # fmt: skip
def test_a_step_of_rl(run_quickstart, architecture, setting):
    settings = [f"tiny_architecture={architecture}", "precision=bf16", "trainer.total_training_steps=2"]
    rows = run_quickstart(*settings, *([] if setting is None else [setting]))
    assert len(rows) == 2
    for row in rows:
        assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]
        assert row["mismatch/probs_pearson"] > 0.99
