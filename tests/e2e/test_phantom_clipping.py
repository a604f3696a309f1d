"""Phantom clipping in the real stack: FP32 training, BF16 rollouts, PPO's ratio against the rollout's log-probs.

At the first update the policy has not changed, so that nothing should be clipped; what is, is rounding: beta, and in
alpha what two BF16 engines differ by.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from kept_responses import index_of
from omegaconf import OmegaConf
from test_collapse import mean

from verl_precision.tools.kept_tokens.kept_file import DECISIONS, KeptResponse, response_at

STALL = Path("recipes/phantom_clipping/phantom_clipping.yaml")
RATIO_ON_ROLLOUT = ("tiny_architecture=qwen3_rough", "estimator=grpo", "trainer.total_training_steps=2")
RATIO_ON_ROLLOUT += ("algorithm.rollout_correction.bypass_mode=True", "+presets=yield")
SHADOW = "actor_rollout_ref.actor.fsdp_config.shadow"
MISMATCHED = (*RATIO_ON_ROLLOUT, "precision=fp32_train_bf16_rollout", f"{SHADOW}.every_n_steps=1")


def clip_fraction(row) -> float:
    return row["actor/clip_fraction_high"] + row["actor/clip_fraction_low"]


def test_mismatched_precisions_clip_tokens_whose_policy_did_not_change(run_quickstart):
    rows = run_quickstart(*MISMATCHED, "mismatch.keep_tokens=6")
    kept: dict[int, list[KeptResponse]] = {}  # by step
    for summary in index_of(path := rows.folder / "kept_tokens"):
        kept.setdefault(summary.step, []).append(response_at(path, summary.offset))
    assert {step: len(found) for step, found in kept.items()} == {1: 6, 2: 6}
    found = [DECISIONS[code] for responses in kept.values() for one in responses for code in one.decisions]
    assert found.count("phantom-clipped") > 0.002 * len(found), "the tokens behind the fraction below"
    for row in rows:
        one = max(kept[row["step"]], key=lambda one: one.largest_gap)
        largest = max(row["mismatch/log_prob_gap_max"], -row["mismatch/log_prob_gap_min"])
        assert one.largest_gap == pytest.approx(largest, rel=1e-5), "the worker has measured the same tokens"
        assert row["phantom/beta_beyond_clip_fraction"] > 0.005
        assert row["phantom/phantom_clipped_fraction"] > 0.002
        assert row["phantom/clipped_fraction"] == pytest.approx(clip_fraction(row), abs=1e-6), "what the loss did"
        assert row["actor/ratio_max"] == pytest.approx(math.exp(row["mismatch/log_prob_gap_max"]), rel=1e-5)
        whole = row["phantom/alpha_mean"] + row["phantom/beta_mean"]
        assert whole == pytest.approx(row["mismatch/log_prob_gap_mean"], abs=1e-6)


@pytest.mark.matrix
def test_ratio_from_the_shadow_has_no_beta(run_quickstart):
    """The loss's value and gradient: tests/engine/ranks.py."""
    for row in run_quickstart(*MISMATCHED, f"{SHADOW}.ratio_source=shadow"):
        assert row["phantom/avoided_fraction"] > 0.002, "what a ratio from the training forward would have clipped"
        assert "phantom/phantom_clipped_fraction" not in row, "beta is not in this loss's ratio"
        assert row["phantom/clipped_fraction"] == pytest.approx(clip_fraction(row), abs=1e-6), "what the loss did"
        assert row["actor/ratio_max"] == pytest.approx(math.exp(row["phantom/alpha_max"]), rel=1e-5), "r is exp(alpha)"


def test_matched_precision_has_none_even_where_the_policy_really_moved(run_quickstart):
    """In verl's colocate_async mode: the second step's responses are of the policy before the first update."""
    mode = "trainer.v1.trainer_mode=colocate_async"
    on_policy, stale = run_quickstart(*RATIO_ON_ROLLOUT, "precision=fp32", f"{SHADOW}.every_n_steps=1", mode)
    assert clip_fraction(on_policy) < 1e-4
    assert clip_fraction(stale) > 0.01, "what PPO's clip is there for"
    for row in (on_policy, stale):
        assert row["phantom/phantom_clipped_fraction"] < 1e-4
        assert row["phantom/beta_abs_mean"] < 1e-5


@pytest.mark.matrix
def test_updates_that_a_rounded_rollout_does_not_see_are_clipped(run_recipe, tmp_path):
    """That clipping is for rounding alone: the first test here; matched precisions have none: the third.

    A run of 90 steps stalls (the recipe's README), and this is its start; curves: docs/log/phantom_clipping.md."""
    task = tmp_path / "task"
    subprocess.run([sys.executable, STALL.with_name("make_task.py"), task], check=True)
    files = (f"actor_rollout_ref.model.path={task}/seed_0/on_grid", f"data.train_files={task}/seed_0/prompts.jsonl")
    arm = OmegaConf.load(STALL).arms.clipped
    clipped = run_recipe(STALL, *arm, *files, "trainer.total_training_steps=8")
    assert clipped[0]["precision/bf16_off_grid_fraction"] == 0, "and few weights leave the grid"
    assert all(0 < row["precision/bf16_crossings_fraction"] < 0.05 for row in clipped[1:])
    assert clipped[0]["phantom/final_token_clip_fraction"] < 0.1, "before the first update the two engines agree"
    assert mean(clipped[3:], "phantom/final_token_clip_fraction") > 0.3, "the tokens that are to be learnt"
    assert mean(clipped[3:], "mismatch/final_token_gap_mean") > 0.1, "the rollout stays behind"
    # It has the weights it was sent, though: scored with the trainer's own, this would grow 1.6 times, and go on.
    assert mean(clipped[4:], "weight_sync/canary_gap") < 1.3 * mean(clipped[:2], "weight_sync/canary_gap")
