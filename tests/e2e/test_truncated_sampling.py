"""top-p and top-k in training, in FP32, in the real stack: the ratio is 1 with the masks, and off without."""

from pathlib import Path

import pytest

QUICKSTART = Path("recipes/quickstart/quickstart.yaml")
TRUNCATED = ("actor_rollout_ref.rollout.top_p=0.8", "actor_rollout_ref.rollout.top_k=64")


@pytest.fixture(scope="module")
def trained(run_recipe):
    """Two steps with the masks, and without."""

    def run(*masks: str) -> list[dict[str, float]]:
        steps = ("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1")
        estimator = ("estimator=grpo", "algorithm.rollout_correction=null")
        return run_recipe(QUICKSTART, "precision=fp32", *estimator, *TRUNCATED, *masks, *steps)

    return {"masks": run("+sampling_masks=replay", "+actor_rollout_ref.rollout.custom.min_p=0.02"), "none": run()}


def largest(row: dict[str, float]) -> float:
    return max(abs(row["mismatch/log_prob_gap_min"]), abs(row["mismatch/log_prob_gap_max"]))


def test_the_masks_make_both_distributions_one(trained):
    """Without, log π - log μ = log π(S), and top_p = 0.8 leaves out a fifth or more. With: FP32's own rounding."""
    for replayed, plain in zip(trained["masks"], trained["none"], strict=True):
        assert largest(replayed) < 1e-5  # 7e-7 here
        assert plain["mismatch/log_prob_gap_mean"] < -0.2
        assert plain["mismatch/k3_kl"] > 1e5 * replayed["mismatch/k3_kl"]
