"""From the metrics of each step to summary, pass bar and table, with numbers by hand."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.runs.compare.summary import REWARD, PassBar, Summary, ratios, summarise, table


def measured(scale: float, rewards=(-30.0, -20.0, -10.0)) -> list[dict[str, float]]:
    return [{
        "step": step, REWARD: reward, "response_length/mean": 41.0 - 10 * step, "mismatch/k3_kl": 1e-5 * scale**2,
        "mismatch/log_prob_gap_abs_mean": 0.01 * scale * step, "mismatch/probs_pearson": 0.999,
        "timing_s/step": {1: 30.0, 2: 5.0, 3: 7.0}[step],
    } for step, reward in enumerate(rewards, start=1)]  # fmt: skip


def test_summary_hand_computed():
    s = summarise(measured(1), 60, "bf16")
    assert (s.steps, s.reward_first, s.reward_last, s.length_first, s.length_last) == (3, -30, -10, 31, 11)
    assert (s.log_prob_gap, s.k3_kl) == pytest.approx((0.02, 1e-5))
    assert s.seconds_per_step == 7, "the median: the first step carries warm-up"


@pytest.mark.parametrize(("steps", "window", "first", "last"), [
    (24, 10, 5.5, 19.5), (20, 10, 5.5, 15.5), (15, 7, 4, 12), (1, 1, 1, 1),
])  # fmt: skip
def test_rewards_are_means_of_ten_steps_or_of_half_of_a_short_run(steps, window, first, last):
    """The reward of step n is n; the table says so of how many steps its means are."""
    s = summarise([{**measured(1)[0], "step": n, REWARD: float(n)} for n in range(1, steps + 1)], 1, "bf16")
    assert (s.reward_steps, s.reward_first, s.reward_last) == (window, first, last)
    text = io.StringIO()
    Console(file=text, width=100).print(table([s, summarise(measured(1), 1, "fp16")]))
    said = " ".join(text.getvalue().split())
    assert f"{first:.3g} -> {last:.3g}" in said
    assert f"mean of the first -> last {'1' if window == 1 else f'1 to {window}'} steps" in said


def test_a_run_that_measured_no_mismatch_is_named():
    rows = [{key: value for key, value in row.items() if "mismatch" not in key} for row in measured(1)]
    with pytest.raises(ConfigurationError, match="mismatch/k3_kl.*mismatch.enabled=True"):
        summarise(rows, 1, "bf16")


def test_a_step_without_a_correlation_is_passed_over():
    """A policy that has become certain has no variance to correlate, and the metric is not there."""
    rows = measured(1)
    del rows[-1]["mismatch/probs_pearson"], rows[1]["mismatch/log_prob_gap_abs_mean"]
    s = summarise(rows, 1, "bf16")
    assert s.pearson_last == 0.999 and s.log_prob_gap == pytest.approx((0.01 + 0.03) / 2)


@pytest.mark.parametrize(("above", "steps", "rewards", "reward", "since"), [
    # Windows of two: means 0, 1/2, 3/4, 3/4, 1.
    (0.7, 2, (0.0, 1.0, 0.5, 1.0, 1.0), 1.0, 3),
    (0.75, 2, (0.0, 1.0, 0.5, 1.0, 1.0), 1.0, 5),  # on the bar is not above it
    (1.0, 2, (0.0, 1.0, 0.5, 1.0, 1.0), 1.0, None),
    (0.9, 2, (1.0, 1.0, 1.0, 0.0), 0.5, None),  # fallen back below
    (0.9, 2, (1.0, 1.0, 1.0, 0.0, 1.0, 1.0), 1.0, 6),  # only the last rise counts
    (0.85, 4, (0.8, 1.0), 0.9, 2),  # shorter than the window: means 0.8, 0.9
    (-11.0, 1, (-40.0, -10.0), -10.0, 2),
    (0.5, 1, (1.0, math.nan), math.nan, None),  # NaN is not above
    (0.5, 1, (math.nan, 1.0), 1.0, 2),
])  # fmt: skip
def test_verdict_by_hand(above, steps, rewards, reward, since):
    rows = [{"step": step, REWARD: reward} for step, reward in enumerate(rewards, start=1)]
    found = PassBar(above, steps).verdict(rows)
    assert found == {"reward": pytest.approx(reward, nan_ok=True), "passed": since is not None, "since": since}


def seeds_of(arm: str, estimator: str | None, scale: float, rewards: tuple[float, ...]) -> list[Summary]:
    """Summaries of one arm, a seed for each last reward; the k3 of seed n is n times that of the first."""
    runs = enumerate((measured(scale, (0.0, last)) for last in rewards), 1)
    found = [summarise(run, 1, arm, estimator=estimator, seed=n) for n, run in runs]
    return [replace(one, k3_kl=one.seed * 1e-5 * scale**2) for one in found]


def rows_of(summaries: list[Summary]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in zip(*(each.cells for each in table(summaries).columns), strict=True)]


def test_with_seeds_an_arm_has_the_mean_and_none_hides_a_seed_without_a_number():
    rows = rows_of([*seeds_of("clipped", None, 10, (0.25, 0.5, 0.9)), *seeds_of("shadow", None, 1, (0.125, math.nan))])
    assert [row[:3] + row[4:5] for row in rows] == [
        ["clipped (3 seeds)", "2", "0 -> 0.55", "2.00e-03"],
        ["shadow (2 seeds)", "2", "0 -> nan", "1.50e-05"],
        ["ratio clipped/shadow", "", "", "133x"],
    ]


@pytest.mark.parametrize(("k3", "shown"), [(1e-7, "100x"), (4.5e-15, None), (5e-14, "2e+08x"), (0.0, None)])
def test_a_ratio_is_readable_and_none_is_taken_to_rounding(k3, shown):
    """10⁻⁵ in BF16; FP32's rounding of log-probs is a k3 of about 10⁻¹⁴."""
    runs = [summarise(measured(1), 1, "bf16"), replace(summarise(measured(1), 1, "fp32"), k3_kl=k3)]
    assert [row[4] for row in rows_of(runs)[2:]] == ([shown] if shown else [])


def test_ratios_are_of_the_means_over_seeds_and_within_an_estimator():
    """k3 of means: (1 + 2)/2 and (1 + 2 + 3)/3 times 10⁻⁵·scale²."""
    arms = [("grpo-bf16", 10, 2), ("grpo-fp16", 1, 3), ("gspo-bf16", 2, 1), ("gspo-fp16", 1, 1)]
    summaries = [one for arm, scale, seeds in arms for one in seeds_of(arm, arm[:4], scale, seeds * (0,))]
    found = {name: (ratio["log_prob_gap"], ratio["k3_kl"]) for name, ratio in ratios(summaries).items()}
    expected = {"grpo-bf16/grpo-fp16": (10, 75), "gspo-bf16/gspo-fp16": (2, 4)}
    assert found == {name: pytest.approx(pair) for name, pair in expected.items()}
