"""Real RL with exact arithmetic: trainer and rollout are equal, bit for bit, at every step.

A mixture in FP16, with the recipe of mixtures; a dense model in BF16, on two ranks: test_cluster_check.py.
"""

from pathlib import Path


def test_a_mixture_trains_and_chooses_the_same_experts(run_recipe):
    """With one update in a step, since choices are compared in updates: a second one's weights have moved."""
    scale = "actor_rollout_ref.actor.fsdp_config.loss_scale.initial=1024"  # low enough for two steps without a skip
    steps = ("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1")
    exact = ("scale=cpu", "precision=fp16", scale, "estimator=grpo_seq_mis", "+arithmetic=exact")
    exact += ("+router_replay=measure", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    for row in run_recipe(Path("recipes/moe/moe.yaml"), *exact, *steps):
        assert row["mismatch/equal_fraction"] == row["mismatch/routing_agreement"] == 1
        assert row["actor/grad_norm"] > 0 and row["alarm/active_count"] == row["precision/skipped_steps"] == 0
        assert row["weight_sync/canary_gap"] < 0.5 * row["weight_sync/canary_bound"]
        assert row["weight_sync/verified_layers"] > 0 == row["weight_sync/unverified_layers"]
