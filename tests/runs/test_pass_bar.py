"""The pass bar, with numbers by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError
from verl_precision.runs.pass_bar import PassBar
from verl_precision.runs.results import REWARD


def _rows(*rewards: float) -> list[dict[str, float]]:
    return [{"step": step, REWARD: reward} for step, reward in enumerate(rewards, start=1)]


def test_by_hand():
    """Windows of two over 0, 1, 0.5, 1, 1: means 0, 1/2, 3/4, 3/4, 1; above 0.7 from the third on."""
    rows = _rows(0.0, 1.0, 0.5, 1.0, 1.0)
    assert PassBar(0.7, 2).verdict(rows) == {"reward": 1.0, "passed": True, "since": 3}
    assert PassBar(0.75, 2).verdict(rows) == {"reward": 1.0, "passed": True, "since": 5}, "on the bar is not above it"
    assert PassBar(1.0, 2).verdict(rows) == {"reward": 1.0, "passed": False, "since": None}


def test_steps_are_verls_not_counted():
    """A resumed run's first row is not step 1."""
    rows = [{**row, "step": row["step"] + 10} for row in _rows(0.0, 1.0, 1.0)]
    assert PassBar(0.9, 1).verdict(rows)["since"] == 12


def test_a_run_that_falls_back_below_has_not_passed():
    """Windows of two over 1, 1, 1, 0: the last mean is 1/2. Up again afterwards, only the last rise counts."""
    fallen = _rows(1.0, 1.0, 1.0, 0.0)
    assert PassBar(0.9, 2).verdict(fallen) == {"reward": 0.5, "passed": False, "since": None}
    assert PassBar(0.9, 2).verdict([*fallen, *({"step": step, REWARD: 1.0} for step in (5, 6))])["since"] == 6


def test_a_run_shorter_than_the_window_is_judged_over_all_it_has():
    """Means of 0.8; 0.8, 1: 0.8, 0.9."""
    found = PassBar(0.85, 4).verdict(_rows(0.8, 1.0))
    assert found["reward"] == pytest.approx(0.9) and found["since"] == 2


def test_negative_rewards_have_a_bar_too():
    assert PassBar(-11.0, 1).verdict(_rows(-40.0, -10.0))["since"] == 2


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
    st.integers(1, 8),
    st.floats(-1e3, 1e3),
)
def test_since_is_the_first_step_of_the_last_stretch_above(rewards, steps, above):
    found = PassBar(above, steps).verdict(_rows(*rewards))
    window = rewards[-steps:]
    assert found["reward"] == pytest.approx(math.fsum(window) / len(window), abs=1e-9)
    assert found["passed"] == (found["reward"] > above) == (found["since"] is not None)
    if found["passed"]:
        ends = [PassBar(above, steps).verdict(_rows(*rewards[:end]))["passed"] for end in range(1, len(rewards) + 1)]
        assert all(ends[found["since"] - 1 :]) and (found["since"] == 1 or not ends[found["since"] - 2])


@pytest.mark.parametrize(
    ("above", "steps", "words"),
    [
        (math.nan, 4, "--pass-bar nan.*0.95"),
        (math.inf, 4, "--pass-bar inf"),
        (0.9, 0, "--pass-steps 0.*1 or more"),
        (0.9, -1, "--pass-steps -1"),
    ],
)
def test_a_bar_that_means_nothing_is_refused(above, steps, words):
    with pytest.raises(ConfigurationError, match=words):
        PassBar(above, steps)


def test_a_reward_that_is_no_number_is_not_above():
    assert PassBar(0.5, 1).verdict(_rows(1.0, math.nan))["passed"] is False
    assert PassBar(0.5, 1).verdict(_rows(math.nan, 1.0))["since"] == 2


def test_sentence():
    assert PassBar(0.95, 2).sentence("fp16", _rows(0.5, 0.96, 1.0)) == (
        "fp16: critic/score/mean 0.980 over the last 2 steps, bar 0.95: passed, above since step 3"
    )
    shorter = PassBar(0.95, 4).sentence("bf16", _rows(0.5, 0.5))
    assert shorter == "bf16: critic/score/mean 0.500 over the last 2 steps, bar 0.95: not passed"
