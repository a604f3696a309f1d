"""top-p and top-k in training, in FP32, in the real stack: the ratio is 1 with the masks, and off without.

The model has one matrix for embedding and head, which a sync must reach twice: test_weight_sync.py.
"""

import math

import pytest

TOP_K = 8  # of 99 tokens, of which e^3.1 = 22 would count: the entropy is about 3.1 nats
TRUNCATED = ("actor_rollout_ref.rollout.top_p=0.8", f"actor_rollout_ref.rollout.top_k={TOP_K}")


@pytest.fixture(scope="module")
def trained(run_quickstart):
    """Run two steps, with masks or without; return their metrics."""
    steps = ("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1")
    model = ("tiny_architecture=qwen3_tied", "precision=fp32")
    estimator = ("estimator=grpo", "algorithm.rollout_correction=null")
    return lambda *masks: run_quickstart(*model, *estimator, *TRUNCATED, *masks, *steps)


@pytest.fixture(scope="module")
def masked(trained):
    return trained("+sampling_masks=replay", "+actor_rollout_ref.rollout.custom.min_p=0.02")


def test_the_masks_make_both_distributions_one(masked):
    """What is left is FP32's own rounding, and the trainer's distribution is one over so many tokens at most."""
    for row in masked:
        assert max(abs(row["mismatch/log_prob_gap_min"]), abs(row["mismatch/log_prob_gap_max"])) < 1e-5  # 7e-7 here
        assert 0 < row["actor/entropy"] < math.log(TOP_K)
        assert row["weight_sync/verified_layers"] > 20 and row["weight_sync/unverified_layers"] == 0
        assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]


@pytest.mark.matrix
def test_without_masks_the_ratio_is_off(masked, trained):
    """log π - log μ = log π(S), and top_p = 0.8 leaves out a fifth or more; tests/engine/test_log_probs.py."""
    for replayed, plain in zip(masked, trained(), strict=True):
        assert plain["mismatch/log_prob_gap_mean"] < -0.2
        assert plain["mismatch/k3_kl"] > 1e5 * replayed["mismatch/k3_kl"]
