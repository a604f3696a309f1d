"""Each kind of alarm: raised once, with what to do, silent on real healthy runs, and the same after a resume."""

import json
import math

import pytest

from verl_precision.errors import CheckpointStateError, ConfigurationError, MismatchAlarmError
from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm import MismatchAlarm, act_on
from verl_precision.mismatch.alarm_settings import AlarmSettings
from verl_precision.mismatch.remedies import ADVICE
from verl_precision.runs.read import read_metrics

HEALTHY = {
    keys.K3_KL: 1e-5,
    keys.LOG_PROB_GAP: 3e-3,
    keys.PROBS_PEARSON: 0.999,
    keys.PROB_GAP_MIN: -0.3,
    keys.PROB_GAP_MAX: 0.4,
    keys.BETA_BEYOND_CLIP: 1e-4,
    keys.PHANTOM: 1e-4,
    "actor/" + keys.LOSS_SCALE: 65536.0,
    "actor/" + keys.SKIPPED_STEPS: 0.0,
}
KINDS = [
    ("k3_growth", {keys.K3_KL: 1e-3}, 8),
    ("gap_growth", {keys.LOG_PROB_GAP: 3e-2}, 8),
    ("mismatch_not_finite", {keys.LOG_PROB_GAP: math.nan}, 5),
    ("extreme_prob_gap", {keys.PROB_GAP_MIN: -0.99}, 5),
    ("extreme_prob_gap", {keys.PROB_GAP_MAX: 0.99}, 5),
    ("beta_beyond_clip", {keys.BETA_BEYOND_CLIP: 0.05}, 5),
    ("phantom_clipping", {keys.PHANTOM: 0.18}, 5),
    ("skipped_step_storm", {"actor/" + keys.SKIPPED_STEPS: 1.0}, 10),
    ("loss_scale_at_minimum", {"actor/" + keys.LOSS_SCALE: 1.0}, 1),
    ("policies_differ", {keys.PROBS_PEARSON: 0.01}, 2),
]


def feed(alarm: MismatchAlarm, metrics: dict, start: int, steps: int) -> list:
    return [raised for step in range(start, start + steps) for raised in alarm.update(step, metrics)]


@pytest.mark.parametrize(("name", "sick", "delay"), KINDS)
def test_each_kind_is_raised_once_recovers_and_is_raised_again(name, sick, delay):
    alarm = MismatchAlarm()
    assert feed(alarm, HEALTHY, 1, 40) == [] and alarm.active == []
    (raised,) = feed(alarm, HEALTHY | sick, 41, 30)
    assert (raised.name, raised.step, raised.since_step) == (name, 40 + delay, 41)
    ((key, value),) = sick.items()
    assert raised.metric == key.removeprefix("actor/")
    assert raised.seen == value or (math.isnan(value) and math.isnan(raised.seen))
    assert raised.try_first == list(ADVICE[name].try_first)
    assert alarm.active == [name]
    assert feed(alarm, HEALTHY, 71, 30) == [] and alarm.active == []
    assert [again.name for again in feed(alarm, HEALTHY | sick, 101, 30)] == [name]


def test_every_advice_belongs_to_a_check():
    assert set(ADVICE) == {name for name, _, _ in KINDS}
    for advice in ADVICE.values():
        assert advice.meaning and advice.try_first


@pytest.mark.parametrize("name", ["k3_growth", "beta_beyond_clip", "phantom_clipping", "extreme_prob_gap"])
def test_matching_precisions_is_the_first_thing_to_try(name):
    assert "precision=fp16" in ADVICE[name].try_first[0]


def test_text_says_what_since_when_and_what_to_do():
    (raised,) = feed(MismatchAlarm(), HEALTHY | {keys.PHANTOM: 0.18}, 1, 5)
    lines = str(raised).splitlines()
    assert lines[0] == "ALARM phantom_clipping at step 5, since step 1"
    assert lines[1] == "  phantom/fraction = 0.18; allowed up to 0.01 of the tokens"
    assert [line[:5] for line in lines[4:]] == ["  1. ", "  2. ", "  3. "]
    assert "precision=fp16" in lines[4] and "ratio_source=shadow" in lines[5] and "clip range" in lines[6]


def test_sync_that_did_not_take_at_the_first_steps():
    """VERL_FACTS: the stale tied head shows as a correlation near 0 from the start."""
    raised = feed(MismatchAlarm(), {keys.PROBS_PEARSON: 0.003, keys.LOG_PROB_GAP: 4.2}, 1, 10)
    assert [(a.name, a.step, a.metric) for a in raised] == [("policies_differ", 2, keys.PROBS_PEARSON)]
    raised = feed(MismatchAlarm(), {keys.PROBS_PEARSON: 0.8, keys.LOG_PROB_GAP: 4.2}, 1, 10)
    assert [(a.name, a.metric, a.seen) for a in raised] == [("policies_differ", keys.LOG_PROB_GAP, 4.2)]


def test_alarm_comes_before_a_synthetic_collapse():
    """Steady for 100 steps, then k3 doubles every 20; the run collapses when it reaches 0.1, 13.3 doublings on.

    3 times the baseline is passed after 20 log2(3) = 31.7 steps; from there the score rises by (2 / log 3) log 2 / 20 =
    0.0631 a step, and 0.0631 n²/2 = 8 after n = 15.9 steps: at step 148.
    """
    alarm, k3, collapsed, first = MismatchAlarm(), 1e-5, None, None
    for step in range(1, 500):
        k3 *= 2 ** (1 / 20) if step > 100 else 1
        raised = alarm.update(step, {keys.K3_KL: k3, keys.LOG_PROB_GAP: math.sqrt(2 * k3)})
        first = first or (raised and raised[0].step)
        collapsed = collapsed or (step if k3 >= 0.1 else None)
    assert collapsed == 366 and first == 148


def test_fp32_with_a_mismatch_of_zero_is_silent():
    zeros = {keys.K3_KL: 0.0, keys.LOG_PROB_GAP: 0.0, keys.PROBS_PEARSON: 1.0}
    alarm = MismatchAlarm()
    rounding = {keys.K3_KL: 5e-15, keys.LOG_PROB_GAP: 1e-7, keys.PROBS_PEARSON: 1.0}
    assert feed(alarm, zeros, 1, 50) == [] and feed(alarm, rounding, 51, 50) == []


def test_missing_nan_and_huge_values_do_not_break_it():
    alarm = MismatchAlarm(AlarmSettings(persist_steps=1000))
    assert feed(alarm, {}, 1, 50) == [] and feed(alarm, dict.fromkeys(HEALTHY, math.nan), 51, 50) == []
    assert alarm.state_dict()["k3_growth"]["baseline"] == []
    feed(alarm, HEALTHY, 101, 40)
    before = alarm.state_dict()
    feed(alarm, {}, 141, 10)
    assert alarm.state_dict() == before
    names = {raised.name for raised in feed(alarm, {keys.K3_KL: math.inf, keys.LOG_PROB_GAP: 1e300}, 151, 20)}
    assert names == {"k3_growth", "gap_growth", "policies_differ"}


def test_null_of_the_file_logger_is_nan():
    raised = feed(MismatchAlarm(), {keys.LOG_PROB_GAP: None}, 1, 5)
    assert [alarm.name for alarm in raised] == ["mismatch_not_finite"]


@pytest.mark.parametrize("cut", [10, 43, 46, 60, 75])
def test_a_resumed_run_raises_what_an_unbroken_one_does(cut):
    rows = [HEALTHY] * 40 + [HEALTHY | {keys.K3_KL: 1e-4, keys.PHANTOM: 0.1}] * 25 + [HEALTHY] * 30
    unbroken = MismatchAlarm()
    expected = [raised for step, row in enumerate(rows) for raised in unbroken.update(step, row)]
    assert [raised.name for raised in expected] == ["phantom_clipping", "k3_growth"]
    alarm, found = MismatchAlarm(), []
    for step, row in enumerate(rows):
        if step == cut:
            state = json.loads(json.dumps(alarm.state_dict()))
            alarm = MismatchAlarm()
            alarm.load_state_dict(state)
        found += alarm.update(step, row)
    assert found == expected and alarm.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("state", [{}, {"k3_growth": {"baseline": "x"}}])
def test_a_foreign_state_is_refused_and_changes_nothing(state):
    alarm = MismatchAlarm()
    feed(alarm, HEALTHY, 1, 40)
    before = alarm.state_dict()
    with pytest.raises(CheckpointStateError, match="mismatch alarm.*Remove it"):
        alarm.load_state_dict(state)
    assert alarm.state_dict() == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("baseline_steps", [5, 30])
def test_silent_on_recorded_healthy_runs(root, precision, baseline_steps):
    """Ten steps of the quickstart: with a baseline of 5 the other five are tested for growth."""
    rows = read_metrics(root / "tests" / "data" / "quickstart" / precision / "metrics.jsonl")
    alarm = MismatchAlarm(AlarmSettings(baseline_steps=baseline_steps))
    assert len(rows) == 10 and all(keys.value_of(row, keys.K3_KL) for row in rows)
    assert [raised for row in rows for raised in alarm.update(int(row["step"]), row)] == []


def test_stop_ends_the_run_on_a_severe_alarm_only():
    severe = feed(MismatchAlarm(), {keys.PROBS_PEARSON: 0.0}, 1, 2)
    mild = feed(MismatchAlarm(), {keys.PHANTOM: 0.5}, 1, 5)
    said: list[str] = []
    act_on(severe + mild, AlarmSettings(), said.append)
    act_on(mild, AlarmSettings(on_alarm="stop"), said.append)
    assert len(said) == 3
    with pytest.raises(MismatchAlarmError, match="(?s)policies_differ.*on_alarm='stop'") as caught:
        act_on(mild + severe, AlarmSettings(on_alarm="stop"), said.append)
    assert len(said) == 5 and "phantom" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_alarm", "warn"),
        ("baseline_steps", 4),
        ("baseline_steps", 30.0),
        ("evidence_steps", 0),
        ("persist_steps", True),
        ("skipped_steps", 0),
        ("allowed_growth", 1.0),
        ("allowed_growth", math.inf),
        ("extreme_gap", 0.0),
        ("extreme_gap", 1.1),
        ("affected_fraction", math.nan),
        ("sync_pearson", 1.0),
        ("sync_gap", 0),
        ("loss_scale_minimum", -1.0),
    ],
)
def test_bad_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=rf"alarm\.{name}=.*Allowed: .*\.$"):
        AlarmSettings(**{name: value})


def test_settings_that_switch_a_check_off():
    off = AlarmSettings(extreme_gap=1.0, affected_fraction=1.0, loss_scale_minimum=0, sync_pearson=-1)
    sick = {keys.PROB_GAP_MIN: -1.0, keys.PHANTOM: 1.0, keys.LOSS_SCALE: 1.0, keys.PROBS_PEARSON: -1.0}
    assert feed(MismatchAlarm(off), sick, 1, 50) == []
