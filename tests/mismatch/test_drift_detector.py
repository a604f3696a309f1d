"""Growth by hand, and the bookkeeping of both detectors."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.mismatch.drift_detector import Growth, Persistence


def growth(baseline=(), **changed) -> Growth:
    settings = {"power": 1, "floor": 1e-10, "baseline_steps": 5, "allowed_growth": 4.0, "evidence_steps": 3}
    detector = Growth(**{**settings, **changed})
    for step, value in enumerate(baseline):
        assert not detector.update(step, value)
    return detector


def test_score_by_hand():
    """Baseline 1e-5 without noise: m = log 1e-5, tolerance = log 4 = 2 log 2.

    value / m = 4: score 2 log 4 / log 4 - 2 = 0. 8: 2 * 1.5 - 2 = 1. 1: -2, held at -1. 4 sqrt 2: 0.5.
    """
    detector = growth([1e-5] * 5)
    assert detector.reference() == pytest.approx((math.log(1e-5), math.log(4)))
    seen = []
    for step, factor in enumerate((4 * math.sqrt(2), 4, 4 * math.sqrt(2), 8, 1000, 1, 1, 1), 5):
        seen.append((detector.update(step, factor * 1e-5), round(detector.evidence, 9), detector.since))
    evidence = [0.5, 0.5, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0]
    assert seen == [(x == 3.0, x, 5 if x else None) for x in evidence]
    assert not detector.active


def test_tolerance_follows_a_noisy_baseline():
    """log values -2, -1, 0, 1, 2: median 0, MAD 1, so 2σ = 2 * 1.4826 > log 4."""
    assert growth(map(math.exp, (-2, 1, 0, 2, -1))).reference() == pytest.approx((0, 2 * 1.4826))


def test_power_two_allows_a_gap_the_square_root():
    """With power 2, a factor of 2 is the allowed 4."""
    detector = growth([1e-3] * 5, power=2)
    detector.update(5, 2e-3)
    assert detector.evidence == pytest.approx(0, abs=1e-9)
    detector.update(6, 2e-3 * math.sqrt(2))
    assert detector.evidence == pytest.approx(1)


def test_zeros_and_nan_are_passed_over_and_a_step_however_large_is_one_step_of_evidence():
    detector = growth([0.0, math.nan, 1e-14, -1e-16] * 25)
    assert detector.reference() == (math.log(1e-10), math.log(4)) and detector.evidence == 0
    assert not detector.update(100, math.inf) and detector.evidence == 1
    assert [detector.update(step, 1e-5) for step in range(101, 108)] == [False, True, *[False] * 5]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_any_series_keeps_the_state_in_bounds_and_json(values):
    detector, copy = growth(), growth()
    for step, value in enumerate(values):
        detector.update(step, value)
        assert 0 <= detector.evidence <= 3 and all(map(math.isfinite, detector.baseline))
        assert (detector.since is None) == (detector.evidence == 0 and not detector.active)
    copy.load(json.loads(json.dumps(detector.state())))
    assert copy == detector


def test_persistence_fires_once_and_again_after_recovery():
    check = Persistence(3)
    fired = [step for step, mark in enumerate("xx..xxxx.x..xx....xxx") if check.update(step, mark == "x")]
    assert fired == [6, 20] and check.since == 18


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 4))
def test_persistence_fires_only_after_that_many_in_a_row_or_a_share(marks, steps):
    check, copy = Persistence(steps), Persistence(steps)
    for step, mark in enumerate(marks):
        if check.update(step, mark):
            run = all(marks[step + 1 - steps : step + 1]) and check.since == step + 1 - steps
            shared = sum(marks[max(0, step + 4 - 8 * steps) : step + 1]) >= 2 * steps
            assert mark and marks[check.since] and (run or shared)
    copy.load(json.loads(json.dumps(check.state())))
    assert copy == check
