"""verl's separate_async on a CPU: the rollout has processes of its own, and gets weights and digests by `vp_gloo`."""

import pytest

ROLLOUT = "actor_rollout_ref.rollout"
# Without INFO, because verl 0.9.1 then logs in a form that raises (trainer_separate_async.py: info(..., flush=True)).
SEPARATE = f"""
    trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1
    {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1 {ROLLOUT}.checkpoint_engine.backend=vp_gloo
    {ROLLOUT}.checkpoint_engine.custom_backend_module=verl_precision.integration.cpu.gloo_checkpoint_engine
    actor_rollout_ref.hybrid_engine=False ray_kwargs.ray_init.num_gpus=2
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=WARN precision=fp16 trainer.total_training_steps=3
"""


@pytest.mark.matrix
def test_digests_travel_to_a_rollout_of_its_own(run_quickstart):
    """k3 is that of `sync` where the weights are current; a step later the responses are one update old."""
    rows = run_quickstart(*SEPARATE.split())
    assert [row["mismatch/stale_fraction"] for row in rows] == [0, 1, 1]
    assert rows[0]["mismatch/k3_kl"] < 1e-6, "1.1e-8 in the first run"
    assert len({row["weight_sync/weights_digest"] for row in rows}) == 3
    for row in rows:
        assert row["weight_sync/verified_layers"] == 35 and row["weight_sync/canary_gap"] < 1e-3
