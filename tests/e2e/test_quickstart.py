"""The quickstart shows the paper's effect in the real stack."""

import json

import torch

from verl_precision.compare.results import read_metrics
from verl_precision.compare.run import marked_processes


def test_both_runs_learn(comparison):
    _, summaries, _ = comparison
    for summary in summaries.values():
        assert summary.steps == 5
        assert summary.length_first > 30
        assert summary.length_last < 0.8 * summary.length_first
        assert summary.reward_last > summary.reward_first


def test_fp16_mismatch_is_at_least_ten_times_below_bf16(comparison):
    _, summaries, _ = comparison
    assert summaries["bf16"].k3_kl > 10 * summaries["fp16"].k3_kl
    assert summaries["bf16"].log_prob_gap > 3 * summaries["fp16"].log_prob_gap


def test_rollout_follows_the_trainer(comparison):
    folder, summaries, _ = comparison
    for precision in summaries:
        for row in read_metrics(folder / precision / "metrics.jsonl"):
            assert row["mismatch/probs_pearson"] > 0.99, (precision, row["step"])


def test_our_k3_is_verls(comparison):
    """The same quantity, measured by verl from the same tensors in float32, which loses e^g - g - 1 to rounding."""
    folder, summaries, _ = comparison
    for precision in summaries:
        for row in read_metrics(folder / precision / "metrics.jsonl"):
            ours, theirs = row["mismatch/k3_kl"], row["rollout_corr/k3_kl"]
            assert abs(ours - theirs) < 0.05 * ours + torch.finfo(torch.float32).eps, (precision, row["step"])


def test_what_the_user_gets(comparison):
    folder, _, seen = comparison
    assert "ratio bf16/fp16" in seen and "Ray has started" in seen and "step 5/5" in seen
    content = json.loads((folder / "summary.json").read_text())
    assert [run["precision"] for run in content["runs"]] == ["bf16", "fp16"]
    assert content["versions"]["verl"] and content["ratios"]["bf16/fp16"]["k3_kl"] > 10
    assert (folder / "comparison.png").stat().st_size > 10_000
    assert "k3 KL" in (folder / "report.html").read_text(encoding="utf-8")
    for precision in ("bf16", "fp16"):
        assert {path.name for path in (folder / precision).iterdir()} >= {"train.log", "metrics.jsonl"}


def test_nothing_is_left_running(comparison):
    assert marked_processes() == []
