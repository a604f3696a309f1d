"""Bars for k3 and their errors, and what has moved between two stacks."""

import io
import json
import math
from types import SimpleNamespace

import pytest
from composer import ROOT
from rich.console import Console

from verl_precision.base.errors import CheckFailedError, ConfigurationError
from verl_precision.tools.gap import gate
from verl_precision.tools.jobs.settings import MismatchJob


def pair(k3, error, rollout="bf16", train="bf16"):
    return SimpleNamespace(rollout=rollout, train=train, k3=k3, k3_error=error)


def summary(k3, error, **about):
    found = {"rollout": "bf16", "train": "bf16", "mismatch/k3_kl": k3, "k3_kl_standard_error": error}
    return {"pairs": [found], "versions": {"vllm": "1"}, "settings": {"seed": 0, **about}}


@pytest.mark.parametrize(("k3", "error", "verdict"), [
    (5e-4, 1e-4, "below"), (9.9e-4, 1e-4, "within chance"), (1.1e-3, 1e-4, "within chance"), (1.3e-3, 1e-4, "above"),
    (0.0, 0.0, "below"), (5e-4, math.nan, "cannot be judged"), (math.nan, math.nan, "cannot be judged"),
])  # fmt: skip
def test_a_k3_fails_above_its_bar_beyond_chance_or_where_nothing_is_known(k3, error, verdict):
    both = [pair(k3, error), pair(1.0, 0.0, train="fp16")]
    bars = MismatchJob(rollout_dtypes=("bf16",), fail_above=("bf16/bf16=1e-3",)).bars()
    if verdict in ("above", "cannot be judged"):
        with pytest.raises(CheckFailedError, match=f"rollout bf16, train bf16: .*bar 0.001: {verdict}"):
            gate.judged(both, bars)
    else:
        (line,) = gate.judged(both, bars)
        assert line.endswith(f"bar 0.001: {verdict}")


def test_a_bar_is_for_all_pairs_or_for_one_and_another_text_is_refused():
    job = MismatchJob(train_dtypes=("bf16",), fail_above=("fp16/bf16=0.5", "1e-3"))
    assert job.bars() == {("fp16", "bf16"): 0.5, ("bf16", "bf16"): 1e-3}
    for wrong in ("often", "bf16=1", "bf16/fp16=1", "-1", "nan", "inf", ""):
        with pytest.raises(ConfigurationError, match=r"--fail-above.* Allowed: .*fp16/bf16 or bf16/bf16"):
            MismatchJob(train_dtypes=("bf16",), fail_above=(wrong,))


def test_two_stacks_differ_beyond_the_chance_of_both(tmp_path):
    (tmp_path / "new").write_text(json.dumps(summary(1.05e-3, 2e-5, arithmetic="native")))
    cases = {(1e-3, 2e-5): "no", (9e-4, 2e-5): "yes", (None, None): "unknown", (1e-3, None): "unknown"}
    for (k3, error), verdict in cases.items():
        (tmp_path / "old").write_text(json.dumps(summary(k3, error, seed=1)))
        _, (row, *others) = gate.moved(*(gate.read_summary(tmp_path / name) for name in ("old", "new")))
        assert row[0] == "bf16, bf16" and row[-1] == verdict
        assert [line[:3] for line in others] == [["arithmetic", "", "native"], ["seed", "1", "0"]]


def test_the_job_is_refused_before_it_starts_without_a_summary_and_fails_after_it_has_written(tmp_path, monkeypatch):
    shown, earlier = io.StringIO(), tmp_path / "summary.json"

    def measured(job, console):
        job.folder.mkdir()
        (job.folder / "summary.json").write_text(json.dumps(summary(2e-3, 1e-5)))
        return [pair(2e-3, 1e-5)]

    monkeypatch.setattr(gate, "measure_mismatch", measured)
    both = {"rollout_dtypes": ("bf16",), "train_dtypes": ("bf16",), "against": earlier, "output": tmp_path / "job"}
    for text in ("{", "[]", '{"pairs": [{}], "versions": {}, "settings": {}}'):
        earlier.write_text(text)
        with pytest.raises(ConfigurationError, match="--against"):
            gate.measure_and_judge(MismatchJob(**both), Console(file=shown))
    assert not (tmp_path / "job").exists()
    earlier.write_text(json.dumps(summary(1e-3, 1e-5)))
    with pytest.raises(CheckFailedError, match="above"):
        gate.measure_and_judge(MismatchJob(**both, fail_above=("1e-3",)), Console(file=shown, width=120))
    assert "yes" in shown.getvalue()


def test_the_example_workflow_names_what_the_job_takes():
    words = (ROOT / "examples/mismatch_gate.yml").read_text().split("run: |")[-1].split()
    given = {word: words[place + 1] for place, word in enumerate(words) if word.startswith("--")}
    pairs = {"rollout_dtypes": (given["--rollout-dtype"],), "train_dtypes": (given["--train-dtype"],)}
    assert MismatchJob(**pairs, fail_above=(given["--fail-above"],), against=given["--against"]).bars()
