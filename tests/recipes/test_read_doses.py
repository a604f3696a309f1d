"""The recipe's own reader of dose and response: which steps it takes, and the point each run becomes."""

import pytest

from verl_precision.tools.runs.read import read_runs


@pytest.fixture
def reader(load_script):
    return load_script("recipes/collapse/read_doses.py")


@pytest.fixture
def outcomes(reader, write_run, tmp_path):
    """A run that rises and falls in BF16 while its mismatch grows, and one that rises in FP16."""
    same = {"mismatch/probs_pearson": 0.99, "mismatch/sequence_log_ratio_std": 1.1, "mismatch/sequence_ess": 40.0}
    for arm, k3, rewards in (("bf16_100", 1e-2, (0.3, 0.6, 0.1)), ("fp16_100", 1e-4, (0.3, 0.6, 0.9))):
        steps = [
            (reward, k3 * growth) for reward, growth in zip(rewards, (1, 100, 100), strict=True) for _ in range(10)
        ]
        write_run(arm, 3, [{"critic/score/mean": reward, "mismatch/k3_kl": each, **same} for reward, each in steps])
    return [reader.outcome_of(run) for run in read_runs([tmp_path])]


def test_mismatch_of_the_first_steps_and_reward_of_the_last(reader, outcomes):
    header, _, *rows = reader.table(outcomes).splitlines()
    assert header.split(" | ")[0] == "| logits"
    assert rows == [
        "| 100 | bf16 | 3 | 30 | 1.0e-02 | 0.9900 | 1.10 | 40 | 0.30 | 0.60 | 0.10 | none |",
        "| 100 | fp16 | 3 | 30 | 1.0e-04 | 0.9900 | 1.10 | 40 | 0.30 | 0.90 | 0.90 | none |",
    ]


def test_the_curve_has_a_point_for_each_run_and_a_line_for_each_precision(reader, outcomes):
    over_steps, axes = reader.draw(outcomes).axes
    assert [line.get_ydata()[-1] for line in over_steps.lines] == [pytest.approx(0.1), pytest.approx(0.9)]
    points, lines = axes.lines[::2], axes.lines[1::2]
    assert [list(each.get_ydata()) for each in points] == [[pytest.approx(0.1)], [pytest.approx(0.9)]]
    assert [line.get_label() for line in lines] == ["BF16", "FP16"] and axes.get_xscale() == "log"
