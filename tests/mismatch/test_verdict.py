"""The verdict on every recorded run, at every step of it, and on made-up ones.

python tests/mismatch/test_verdict.py    the table of docs/log/verdict.md
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch import verdict
from verl_precision.mismatch.alarm import ADVICE, MismatchAlarm, remedies_in_use
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.mismatch.verdict import CAUSES, GRAVITY, Judge, Verdict
from verl_precision.tools.runs.read import read_metrics

TESTS = Path(__file__).parents[1]
# A rescued run and its rescue are one unit. Of the units in sorted order every second is in half B.
PATHS = sorted([*TESTS.glob("mismatch/recorded/**/*.jsonl"), *TESTS.glob("data/quickstart/**/*.jsonl")])
UNITS = list(dict.fromkeys(path.parent if "rescued" in path.parts else path for path in PATHS))
HALF = {path: "AB"[UNITS.index(path.parent if "rescued" in path.parts else path) % 2] for path in PATHS}


def is_sick(path: Path) -> bool:
    """Tell whether the run lost its reward, or learned nothing, or learned half of what it could (docs/log)."""
    return path.name in ("before.jsonl", "seeded_collapse.jsonl") or path.parts[-2:] == ("long_text", "bf16.jsonl")


def verdict_of(rows, settings=None, in_use=()) -> Verdict:
    judge = Judge(MismatchAlarm(settings, in_use))
    for row in rows:
        judge.update(int(row["step"]), row)
    return judge.verdict()


def verdicts_at_each_step(path: Path) -> dict[int, Verdict]:
    judge, found = Judge(), {}
    for row in read_metrics(path):
        judge.update(int(row["step"]), row)
        found[int(row["step"])] = judge.verdict()
    return found


def is_wrong(path: Path, found: dict[int, Verdict]) -> bool:
    words = [each.word for each in found.values()]
    right = words[-1] in ("act now", "watch") if is_sick(path) else words[-1] in ("healthy", "too short to judge")
    return not right or "act now" in words and not is_sick(path)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_healthy_run_is_to_act_on_at_any_step_and_no_sick_one_is_healthy_at_its_end(path):
    assert not is_wrong(path, found := verdicts_at_each_step(path))
    assert verdict_of(read_metrics(path)) == [*found.values()][-1]


def test_a_collapse_is_to_act_on_before_the_reward_falls():
    found = verdicts_at_each_step(TESTS / "mismatch" / "recorded" / "seeded_collapse.jsonl")
    assert min(step for step, each in found.items() if each.word == "act now") == 39, "the reward falls at 61"
    assert found[64].alarm == "policies_differ" and "precision=fp16" in found[64].action, "the cure of what came first"


@pytest.mark.parametrize("half", "AB")
@pytest.mark.parametrize("enough", [0.4, 0.5, 0.6, 0.7])
def test_the_threshold_is_not_on_an_edge(half, enough, monkeypatch):
    monkeypatch.setattr(verdict, "ENOUGH", enough)
    assert [path for path in PATHS if HALF[path] == half and is_wrong(path, verdicts_at_each_step(path))] == []


def run(steps: int, **more) -> list[dict]:
    """Return the rows of a healthy run with a reward that rises; `more` are values, or functions of the step."""
    good = {"reward": lambda step: step / 100 + 0.01 * (step % 3), "k3": 1e-5, "sample": 0.9} | more
    metrics = {"reward": names.REWARD, "k3": names.K3_KL, "sample": "actor/" + names.WEIGHT_ESS} | {
        "failed": names.FAILED_MEASUREMENTS, "rescue": names.RESCUE, "clipped": names.PHANTOM_CLIPPED,
    }  # fmt: skip
    values = [{key: f(step) if callable(f) else f for key, f in good.items()} for step in range(1, steps + 1)]
    rows = [{metrics[key]: value for key, value in row.items() if value is not None} for row in values]
    return [{"step": step, **row} for step, row in enumerate(rows, 1)]


def late(value: float, since: int, until: int = 10**6, else_: float | None = None):
    return lambda step: value if since <= step <= until else else_


FALLS = lambda step: 0.01 * (step % 3) + (step / 50 if step < 50 else 0.2)  # noqa: E731
CASES = {
    "healthy": (run(60), "healthy", "no alarm in steps 1 to 60; k3 1e-05, effective sample 0.9, reward 0.065 to 0.564"),
    "a rescue": (run(60, rescue=1.0), "healthy", "a rescue in FP16: no alarm"),
    "short": (run(12), "too short to judge", "18 more measured steps are needed"),
    "nothing at all": ([], "too short to judge", "no step"),
    "not measured": (run(90, k3=None, sample=None), "too short to judge", "nothing is measured in steps 1 to 90"),
    "failed": (run(9, k3=None, failed=2.0), "too short to judge", "9 failed"),
    "no longer measured": (run(90, k3=late(1e-5, 1, 50)), "watch", "nothing is measured since step 50"),
    "short with an alarm": (run(6, sample=0.15), "watch", "low_effective_sample_size since step 1"),
    "a thin sample": (run(6, sample=0.02), "act now", "is_weight_ess_fraction 0.02, allowed down to 0.2"),
    "a sample that was thin": (run(9, sample=late(0.9, 8, else_=0.02)), "act now", "fraction 0.02, now 0.9, allowed"),
    "clipped, learns": (run(60, clipped=0.05), "watch", "phantom_clipping since step 1"),
    "clipped, stalls": (run(60, clipped=0.05, reward=lambda step: step % 3), "act now", "reward 1 to "),
    "grows": (run(60, k3=late(1e-3, 41, else_=1e-5)), "act now", "k3_growth since step 41"),
    "just recovered": (run(80, k3=late(1e-3, 41, 55, else_=1e-5)), "watch", "it has recovered since step"),
    "recovered long ago": (run(200, k3=late(1e-3, 41, 55, else_=1e-5)), "healthy", "no alarm since step"),
    "no rewards": (run(60, reward=late(math.nan, 58, else_=0.5)), "act now", "the reward is no number in 3 steps"),
    "falls": (run(80, reward=FALLS), "watch", "reward fell from"),
    "falls after growth": (run(80, reward=FALLS, k3=late(1e-3, 31, 45, else_=1e-5)), "act now", "reward fell from"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_run(case):
    rows, word, reason = CASES[case]
    found = verdict_of(rows)
    assert found.word == word and reason in found.reason, found
    assert found.exit_code == {"healthy": 0, "act now": 2}.get(word, 1)
    assert bool(found.action) == (word in ("watch", "act now") or "measured in" in reason or "failed" in reason)


def test_each_alarm_has_one_cause_and_remedies_in_use_are_no_action():
    assert len(GRAVITY) == len({*GRAVITY}) and {*ADVICE} <= {*GRAVITY} and GRAVITY[0] == CAUSES["not finite"][0]
    rows = CASES["grows"][0]
    in_use = [remedies_in_use("fp16", "fp16", by_loss, False) for by_loss in (False, True)]
    actions = [verdict_of(rows, in_use=remedies).action for remedies in in_use]
    assert "precision=fp16" in verdict_of(rows).action and "pg_seq_mis" in actions[0] and "explain" in actions[1]


@given(st.lists(st.floats(-5, 5) | st.just(math.nan) | st.none(), max_size=40), st.integers(0, 40))
def test_a_resumed_run_has_the_alarms_of_the_whole_one_and_no_value_breaks_it(values, cut):
    rows = run(len(values), k3=lambda step: values[step - 1] and 10 ** values[step - 1], sample=0.01)
    alarm, settings = MismatchAlarm(AlarmSettings(baseline_steps=5)), AlarmSettings(baseline_steps=5)
    whole = verdict_of(rows, settings)
    for row in rows[:cut]:
        alarm.update(row["step"], row)
    resumed = Judge(alarm)
    for row in rows[cut:]:
        resumed.update(row["step"], row)
    if cut < len(rows) and whole.alarm:
        assert replace(resumed.verdict(), reason="") == replace(whole, reason="")


if __name__ == "__main__":
    print("| run | half | it was | verdict at its end | first act now | wrong |\n|---|---|---|---|---|---|")
    for path in PATHS:
        found = verdicts_at_each_step(path)
        first = next((str(step) for step, each in found.items() if each.word == "act now"), "-")
        name, was = path.relative_to(TESTS).with_suffix("").as_posix(), "sick" if is_sick(path) else "healthy"
        cells = [name, HALF[path], was, [*found.values()][-1].word, first, "yes" if is_wrong(path, found) else "no"]
        print("| " + " | ".join(cells) + " |")
