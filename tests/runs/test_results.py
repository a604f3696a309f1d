"""From verl's metrics file to summary, table and JSON."""

import io
import json

import pytest
from rich.console import Console

from verl_precision.errors import ConfigurationError
from verl_precision.runs.results import ratios, read_metrics, summarise, table, write_summary


def _rows(scale: float) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "critic/score/mean": -40.0 + 10 * step,
            "response_length/mean": 41.0 - 10 * step,
            "mismatch/log_prob_gap_abs_mean": 0.01 * scale * step,
            "mismatch/k3_kl": 1e-5 * scale**2,
            "mismatch/probs_pearson": 0.999,
            "timing_s/step": {1: 30.0, 2: 5.0, 3: 7.0}[step],
        }
        for step in (1, 2, 3)
    ]


def test_read_metrics_as_verl_writes_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"a": 0.5}}\n{"step": 2, "data": {"a": 1}}\n')
    assert read_metrics(path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 1}]


def test_summary_hand_computed():
    s = summarise("bf16", _rows(1), seconds_total=60)
    assert (s.steps, s.reward_first, s.reward_last, s.length_first, s.length_last) == (3, -30, -10, 31, 11)
    assert s.log_prob_gap == pytest.approx(0.02)
    assert s.k3_kl == pytest.approx(1e-5)
    assert s.seconds_per_step == 7, "the median: the first step carries warm-up"


def test_ratio_is_the_first_run_over_the_others():
    summaries = [summarise("bf16", _rows(10), 1), summarise("fp16", _rows(1), 1)]
    assert ratios(summaries) == {"bf16/fp16": {"log_prob_gap": pytest.approx(10), "k3_kl": pytest.approx(100)}}


def test_a_run_that_measured_no_mismatch_is_named():
    rows = [{key: value for key, value in row.items() if "mismatch" not in key} for row in _rows(1)]
    with pytest.raises(ConfigurationError, match="mismatch/k3_kl.*mismatch.enabled=True"):
        summarise("bf16", rows, 1)


def test_rewards_between_0_and_1_keep_three_digits():
    rows = _rows(1)
    for row, reward in zip(rows, (0.5234, 0.7, 0.9827), strict=True):
        row["critic/score/mean"] = reward
    text = io.StringIO()
    Console(file=text, width=100).print(table([summarise("fp16", rows, 1)]))
    assert "0.523 -> 0.983" in text.getvalue()


def test_table_and_json(tmp_path):
    runs = {"bf16": _rows(10), "fp16": _rows(1)}
    summaries = [summarise(name, rows, 1) for name, rows in runs.items()]
    text = io.StringIO()
    Console(file=text, width=100).print(table(summaries))
    for word in ("bf16", "fp16", "-30 -> -10", "100.0x", "ratio bf16/fp16", "s/step"):
        assert word in text.getvalue()
    verdicts = {"fp16": {"reward": 0.98, "passed": True, "since": 2}}
    write_summary(tmp_path / "s.json", summaries, ["verl-precision", "compare"], {"verl": "0.9.1"}, verdicts)
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["ratios"]["bf16/fp16"]["k3_kl"] == pytest.approx(100)
    assert [run["precision"] for run in content["runs"]] == ["bf16", "fp16"]
    assert content["pass_bar"] == verdicts
