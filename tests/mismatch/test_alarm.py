"""Each kind of alarm: raised once, with what to do, silent on real healthy runs, and the same after a resume."""

import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from verl_precision.base.errors import CheckpointStateError, ConfigurationError, MismatchAlarmError
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.alarm import ADVICE, MismatchAlarm, act_on, remedies_in_use
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.runs.compare.summary import REWARD
from verl_precision.tools.runs.read import read_metrics

RECORDED = Path(__file__).parent / "recorded"
QUICKSTART = Path(__file__).parents[1] / "data" / "quickstart"
NOISES = ["Gaussian", "Student t(2)", AR := "AR(1), phi 0.8"]
HEALTHY = {
    **dict.fromkeys((names.NONFINITE_TRAINER, names.NONFINITE_ROLLOUT, "actor/" + names.NONFINITE_RESPONSES), 0.0),
    names.K3_KL: 1e-5, names.LOG_PROB_GAP: 3e-3, names.PROBS_PEARSON: 0.999, names.PROB_GAP_MIN: -0.3,
    names.PROB_GAP_MAX: 0.4, names.PHANTOM_CLIPPED: 1e-4, names.NOISE_SHARE: 0.1, names.DRAFT_ACCEPTANCE: 0.7,
    "actor/" + names.WEIGHT_ESS: 0.8, names.KEPT_RESPONSES: 0.9, names.KEPT_TOKENS: 0.9,
    "actor/" + names.REJECTED_TOKENS: 0.1,
    "actor/" + names.TOKEN_WEIGHT_ESS: 0.7, "actor/" + names.LOSS_SCALE: 65536.0, "actor/" + names.SKIPPED_STEPS: 0.0,
    names.ZERO_ADVANTAGE: 0.9, "actor/" + names.ZERO_GRADIENT: 0.95, names.SELF_GAP_RATIO: 1.2, names.SELF_GAP: 0.04,
}  # fmt: skip
# name, the metric that raises it, its value, steps until it is raised
KINDS = [
    ("k3_growth", names.K3_KL, 1e-3, 8),
    ("gap_growth", names.LOG_PROB_GAP, 3e-2, 8),
    ("trainer_not_finite", names.NONFINITE_TRAINER, 1.0, 3),
    ("rollout_not_finite", names.NONFINITE_ROLLOUT, 1.0, 3),
    ("responses_not_finite", "actor/" + names.NONFINITE_RESPONSES, 1.0, 3),
    ("extreme_prob_gap", names.PROB_GAP_MIN, -0.99, 5),
    ("extreme_prob_gap", names.PROB_GAP_MAX, 0.99, 5),
    ("phantom_clipping", names.PHANTOM_CLIPPED, 0.18, 5),
    ("low_effective_sample_size", "actor/" + names.WEIGHT_ESS, 0.05, 5),
    ("low_effective_sample_size", "actor/" + names.TOKEN_WEIGHT_ESS, 0.0, 5),
    ("low_effective_sample_size", names.KEPT_RESPONSES, 0.03, 5),
    ("low_effective_sample_size", names.KEPT_TOKENS, 0.1, 5),
    ("low_effective_sample_size", "actor/" + names.REJECTED_TOKENS, 0.9, 5),
    ("repeated_overflow", "actor/" + names.SKIPPED_STEPS, 1.0, 10),
    ("loss_scale_at_minimum", "actor/" + names.LOSS_SCALE, 1.0, 1),
    ("policies_differ", names.PROBS_PEARSON, 0.01, 2),
    ("no_signal", names.ZERO_ADVANTAGE, 1.0, 10),
    ("no_signal", "actor/" + names.ZERO_GRADIENT, 0.995, 10),
    ("teacher_is_noise", names.NOISE_SHARE, 0.6, 10),
    ("draft_rejected", names.DRAFT_ACCEPTANCE, 0.1, 5),
    ("trainer_disagrees_with_itself", names.SELF_GAP_RATIO, 2.5, 2),
    ("trainer_disagrees_with_itself", names.SELF_GAP, 0.2, 2),
]


def feed(alarm: MismatchAlarm, metrics: dict, start: int, steps: int) -> list:
    return [raised for step in range(start, start + steps) for raised in alarm.update(step, metrics)]


@pytest.mark.parametrize(("name", "metric", "value", "delay"), KINDS)
def test_each_kind_is_raised_once_recovers_and_is_raised_again(name, metric, value, delay):
    alarm, sick = MismatchAlarm(), HEALTHY | {metric: value}
    assert feed(alarm, HEALTHY, 1, 40) == [] and alarm.active == []
    (raised,) = feed(alarm, sick, 41, 30)
    assert (raised.name, raised.step, raised.since_step) == (name, 40 + delay, 41)
    assert raised.metric == metric.removeprefix("actor/")
    assert raised.seen == pytest.approx(value)
    if name == "low_effective_sample_size":  # T1, T2: of what it is
        few = f"allowed down to 0.2 of the {'tokens' if 'token' in metric else 'responses'}"
        assert raised.normal == ("allowed up to 0.8 of the tokens" if "masked" in metric else few)
    assert alarm.active == [name]
    assert feed(alarm, HEALTHY, 71, 30) == [] and alarm.active == []
    assert [again.name for again in feed(alarm, sick, 101, 30)] == [name]


@pytest.mark.parametrize(("name", "metric", "value", "delay"), KINDS)
@pytest.mark.parametrize("period", [2, 3, 4])
def test_what_comes_back_is_raised_once_and_recovers(name, metric, value, delay, period):
    """Twice as many steps as in a row, at every fourth or more often; every fifth is too few."""
    rows = [HEALTHY | ({metric: value} if step % period == 0 else {}) for step in range(200)]
    alarm = MismatchAlarm()
    assert feed(alarm, HEALTHY, 1, 39) == []
    (raised,) = [raised for step, row in enumerate(rows, 40) for raised in alarm.update(step, row)]
    assert (raised.name, raised.since_step) == (name, 40) and raised.seen == pytest.approx(value)
    assert raised.step == (40 if delay == 1 else 40 + period * (2 * delay - 1)), "the run of one, or the share"
    assert alarm.active == [name]
    assert feed(alarm, HEALTHY, 240, 20) == [] and alarm.active == []
    rarely = MismatchAlarm()
    feed(rarely, HEALTHY, 1, 39)
    found = [rarely.update(step, HEALTHY | ({metric: value} if step % 5 == 0 else {})) for step in range(40, 240)]
    assert delay == 1 or not any(found)


def test_the_limits_of_one_alarm_count_together():
    rows = [HEALTHY | ({names.PROB_GAP_MIN: -0.99} if step % 2 else {names.PROB_GAP_MAX: 0.99}) for step in range(5)]
    alarm = MismatchAlarm()
    assert [raised.name for step, row in enumerate(rows) for raised in alarm.update(step, row)] == ["extreme_prob_gap"]


def test_every_check_has_its_advice_and_matching_precisions_comes_first():
    assert set(ADVICE) == {name for name, *_ in KINDS}
    for name in ("k3_growth", "gap_growth", "phantom_clipping", "extreme_prob_gap"):
        assert "precision=fp16" in ADVICE[name].try_first[0]
    (raised,) = feed(MismatchAlarm(), HEALTHY | {names.PHANTOM_CLIPPED: 0.18}, 1, 5)
    said = "phantom_clipping", "step 5", "step 1", names.PHANTOM_CLIPPED, "0.18", "0.01", *raised.advice.try_first
    assert all(words in str(raised) for words in said)


def test_a_remedy_that_is_on_is_not_offered():
    in_use = remedies_in_use("fp16", "fp16", weighs_sequences=True, verifies_syncs=True)
    for name, advice in ADVICE.items():
        offered = " ".join(advice.without(in_use).try_first)
        assert "precision=fp16" not in offered and "pg_seq_mis" not in offered and "verifies each" not in offered, name
    half = remedies_in_use("bf16", "bf16", weighs_sequences=False, verifies_syncs=False)
    assert "precision=fp16" in " ".join(ADVICE["k3_growth"].without(half).try_first)
    assert "precision=bf16" not in " ".join(ADVICE["trainer_not_finite"].without(half).try_first)


def test_missing_nan_and_huge_values_do_not_break_it():
    alarm = MismatchAlarm()
    assert feed(alarm, {}, 1, 50) == [] and feed(alarm, dict.fromkeys(HEALTHY, math.nan), 51, 50) == []
    assert alarm.baseline_missing == 30
    feed(alarm, HEALTHY, 101, 40)
    before = alarm.state_dict()
    feed(alarm, {}, 141, 10)
    assert alarm.state_dict() == before and alarm.baseline_missing == 0
    found = {raised.name for raised in feed(alarm, {names.K3_KL: math.inf, names.LOG_PROB_GAP: 1e300}, 151, 20)}
    assert found == {"k3_growth", "gap_growth", "policies_differ"}


@pytest.mark.parametrize("cut", [10, 43, 46, 60, 75, 110, 125, 141, 150])
def test_a_resumed_run_raises_what_an_unbroken_one_does(cut):
    sick = HEALTHY | {names.K3_KL: 1e-4, names.PHANTOM_CLIPPED: 0.1}
    rows = [HEALTHY] * 40 + [sick] * 25 + [HEALTHY] * 30 + [sick, HEALTHY, HEALTHY] * 20
    unbroken = MismatchAlarm()
    expected = [raised for step, row in enumerate(rows) for raised in unbroken.update(step, row)]
    assert [raised.name for raised in expected] == ["phantom_clipping", "k3_growth"] * 2
    alarm, found = MismatchAlarm(), []
    for step, row in enumerate(rows):
        if step == cut:
            state = json.loads(json.dumps(alarm.state_dict()))
            alarm = MismatchAlarm()
            alarm.load_state_dict(state)
        found += alarm.update(step, row)
    assert found == expected and alarm.state_dict() == unbroken.state_dict()


def state_with(name, **changes):
    state = MismatchAlarm().state_dict()
    return state | {name: state[name] | changes}


@pytest.mark.parametrize("state", [
    {}, [], None, {"k3_growth": {"baseline": "x"}}, state_with("k3_growth", later=1),
    *(state_with("k3_growth", baseline=value) for value in (None, [math.nan] * 40, ["a"], [10**400])),
    *(state_with("k3_growth", evidence=value) for value in (None, "1", math.nan, 10**400)),
    *(state_with("phantom_clipping", since=value) for value in ("x", 1.5)),
    state_with("phantom_clipping", active=1),
])  # fmt: skip
def test_a_foreign_state_is_refused_and_changes_nothing(state):
    alarm = MismatchAlarm()
    feed(alarm, HEALTHY, 1, 40)
    before = alarm.state_dict()
    with pytest.raises(CheckpointStateError, match="mismatch alarm.*Remove it"):
        alarm.load_state_dict(state)
    assert alarm.state_dict() == before


def test_stop_ends_the_run_on_a_severe_alarm_only():
    severe = feed(MismatchAlarm(), {names.PROBS_PEARSON: 0.0}, 1, 2)
    mild = feed(MismatchAlarm(), {names.PHANTOM_CLIPPED: 0.5}, 1, 5)
    said: list[str] = []
    act_on(severe + mild, AlarmSettings(), said.append)
    act_on(mild, AlarmSettings(on_alarm="stop"), said.append)
    assert len(said) == 3
    with pytest.raises(MismatchAlarmError, match="(?s)policies_differ.*on_alarm='stop'") as caught:
        act_on(mild + severe, AlarmSettings(on_alarm="stop"), said.append)
    assert len(said) == 5 and "phantom" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [
    ("on_alarm", "warn"), ("baseline_steps", 4), ("baseline_steps", 30.0), ("action_patience", True),
    ("allowed_growth", 1.0), ("allowed_growth", math.inf), ("persist_steps", 9),
])  # fmt: skip
def test_bad_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=rf"alarm\.{name}=.*Allowed: .*\.$"):
        AlarmSettings(**{name: value})


def alarms_of(path: Path, **settings: int) -> list[tuple[int, str]]:
    alarm = MismatchAlarm(AlarmSettings(**settings))
    return [(int(row["step"]), a.name) for row in read_metrics(path) for a in alarm.update(int(row["step"]), row)]


def test_a_seeded_collapse_is_caught_before_the_reward_falls():
    """Recorded (docs/log/collapse.md): from step 31 on, noise on the rollout's weights grew by 1.35 a step."""
    path = RECORDED / "seeded_collapse.jsonl"
    reward = {int(row["step"]): row[REWARD] for row in read_metrics(path)}
    healthy = min(reward[step] for step in range(25, 41))
    fall = next(step for step in range(41, 65) if reward[step] < healthy - 1)
    found = alarms_of(path)
    assert [name for _, name in found] == ["gap_growth", "k3_growth", "policies_differ"]
    assert 31 < found[0][0] < found[1][0] < fall - 10, "found in time to act, and not before there was anything"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("baseline_steps", [5, 10, 30])
def test_recorded_runs_that_were_fine_raise_none(precision, baseline_steps):
    """The quickstart has ten steps: with a baseline of 5 the other five are tested for growth."""
    for path in (RECORDED / f"sanity_arithmetic_{precision}.jsonl", QUICKSTART / precision / "metrics.jsonl"):
        assert any(names.value_of(row, names.K3_KL) for row in read_metrics(path))
        assert alarms_of(path, baseline_steps=baseline_steps) == []


def test_no_recorded_run_has_no_signal_not_even_those_that_collapsed():
    paths = [*RECORDED.rglob("*.jsonl"), *QUICKSTART.rglob("metrics.jsonl")]
    assert len(paths) > 20 and not any("no_signal" in dict(map(reversed, alarms_of(path))) for path in paths)
    assert not any(row.get("actor/zero_gradient_responses") for path in paths for row in read_metrics(path))


@pytest.fixture(scope="module")
def rates():
    """The benchmark behind the rates of docs/alarm.md; here with fewer seeds."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "alarm_rates.py")))


STEADY = [*((noise, 0.3, 0) for noise in NOISES), ("Gaussian", 0.6, 0), (AR, 0.6, 1)]


@pytest.mark.parametrize(("noise", "sigma", "most"), STEADY)
def test_steady_runs_raise_next_to_nothing(rates, noise, sigma, most):
    flat = np.zeros(rates.STEPS)
    runs = (rates.series(rates.NOISES[noise], sigma, flat, np.random.default_rng(seed)) for seed in range(10))
    assert rates.false_alarms(runs)[0] <= most, "alarms per 1,000 steps"


@pytest.mark.parametrize(("summed", "alarmed"), [(False, 0), (True, 1)])
def test_longer_responses_raise_no_alarm_but_would_if_summed(rates, summed, alarmed):
    assert rates.false_alarms([rates.longer_responses(np.random.default_rng(0), per_response=summed)])[1] == alarmed


@pytest.mark.parametrize(("noise", "begins", "doubling", "latest"), [
    *((noise, 100, *row) for noise in NOISES for row in ((10, 45), (50, 130), (200, 450))),
    *(("Gaussian", 0, *row) for row in ((10, 70), (50, 150), (200, 420))),  # the baseline grows as well
])  # fmt: skip
def test_growth_is_found_in_time(rates, noise, begins, doubling, latest):
    seeds = range(5 if begins else 1)
    assert max(rates.growing(rates.NOISES[noise], 0.3, doubling, begins, seed)[0] for seed in seeds) <= latest
