"""When the alarm acts: after further evidence, for what an action cures, beside no fault, and so often at most."""

import runpy
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from verl_precision.base.errors import CheckpointStateError
from verl_precision.mismatch.alarm import MismatchAlarm, first_alarms
from verl_precision.mismatch.remedies import ADVICE
from verl_precision.mismatch.settings import AlarmSettings
from verl_precision.tools.actions.actions import CURABLE, FAULTS, Action, AlarmActions
from verl_precision.tools.runs.read import read_metrics

RECORDED = Path(__file__).parent / "recorded"

ESS = {"low_effective_sample_size": 1}


def actions(**settings) -> AlarmActions:
    return AlarmActions(AlarmSettings(on_alarm="rescue", **settings))


def begun(judge: AlarmActions, steps: list[dict[str, int]], first: int = 1) -> list[Action]:
    found = [judge.update(step, active) for step, active in enumerate(steps, first)]
    return [each for each in found if each is not None]


def test_it_wants_as_many_further_steps_as_it_is_patient():
    assert begun(actions(), [{}] * 4 + [ESS] * 4) == []
    assert begun(actions(), [{}] * 4 + [ESS] * 9) == [Action("rescue", "low_effective_sample_size", 9, 1)], "once"
    assert begun(actions(action_patience=1), [ESS]) == [Action("rescue", "low_effective_sample_size", 1, 1)]


@pytest.mark.parametrize("fault", FAULTS)
def test_beside_a_fault_nothing_is_done(fault):
    assert begun(actions(), [{**ESS, fault: 1}] * 20) == []


def test_every_alarm_but_an_extreme_gap_is_curable_or_a_fault():
    """BF16 runs of the paper begin with extreme gaps."""
    assert set(ADVICE) - {*CURABLE, *FAULTS} == {"extreme_prob_gap"} and not {*CURABLE} & {*FAULTS}


def test_trouble_began_with_the_first_of_its_alarms():
    (action,) = begun(actions(), [{"k3_growth": 7, "gap_growth": 5}] * 5, first=20)
    assert action == Action("rescue", "k3_growth", 24, 5)


def test_it_ends_after_as_many_steps_without_an_alarm_and_begins_again():
    judge = actions(action_patience=2)
    assert len(begun(judge, [ESS, ESS])) == 1 and judge.active
    begun(judge, [{}, {}], first=3)
    assert not judge.active
    assert [each.step for each in begun(judge, [ESS, ESS], first=5)] == [6]


def test_after_so_many_in_so_many_steps_nothing_is_done_any_more():
    judge = actions(action_patience=1, max_actions=2, action_steps=50)
    found = begun(judge, [ESS, {}] * 5)
    assert [each.step for each in found] == [1, 3] and judge.exhausted and not judge.active
    assert begun(judge, [ESS, {}] * 50, first=200) == []
    slow = actions(action_patience=1, max_actions=2, action_steps=3)
    assert [each.step for each in begun(slow, [ESS, {}] * 5)] == [1, 3, 5, 7, 9], "two within any three steps"


FINE = [f"mismatch/recorded/sanity_arithmetic_{each}.jsonl" for each in ("bf16", "fp16")]
FINE += [f"data/quickstart/{each}/metrics.jsonl" for each in ("bf16", "fp16")]


@pytest.mark.parametrize("path", FINE)
def test_recorded_runs_that_were_fine_are_left_alone(path, root):
    assert replayed(read_metrics(root / "tests" / path)) == []


def test_a_seeded_collapse_would_be_acted_on_before_the_reward_falls():
    """At step 61; the alarm cannot tell that noise in the weights is the cause, which no other precision cures."""
    assert replayed(read_metrics(RECORDED / "seeded_collapse.jsonl")) == [Action("rescue", "gap_growth", 43, 31)]


# Runs of two recipes with `on_alarm=rescue` (docs/alarm.md, Runs that acted), before the rescue and after: the reward,
# and the metrics that the alarm reads, unless all are 0.
RESCUED = sorted((RECORDED / "rescued").iterdir())


@pytest.mark.parametrize("run", RESCUED, ids=[run.name for run in RESCUED])
def test_a_rescued_run_acted_once_learned_and_has_its_row_in_the_docs(run, root):
    before, after = (read_metrics(run / f"{part}.jsonl") for part in ("before", "after"))
    (action,) = replayed(before)
    assert replayed(after) == [] and first_alarms(after) == {}
    assert action.step == before[-1]["step"], "the run ended with that step"
    recipe, _, seed = run.name.rpartition("_seed_")
    if recipe == "phantom_clipping":
        gains = runpy.run_path(str(root / "recipes/phantom_clipping/read_stall.py"))["gains"]
        outcome = gains(SimpleNamespace(rows=after))[73]  # at step 74
        assert outcome >= 0.4, "logging alone: 0.14 at most"
    else:
        outcome = fmean(row["critic/score/mean"] for row in after[-10:])
        assert len(after) == 60 and outcome >= 0.44, "logging alone: 0.20 at most"
    row = f"| {recipe} | {seed} | {action.alarm}, {action.since_step} | {action.step} | {outcome:.2f} |"
    assert row in (root / "docs/alarm.md").read_text().replace("`", "")


def replayed(rows) -> list[Action]:
    alarm, judge, found = MismatchAlarm(), actions(), []
    for row in rows:
        alarm.update(int(row["step"]), row)
        found.append(judge.update(int(row["step"]), alarm.active_since))
    return [each for each in found if each is not None]


def test_a_resumed_run_goes_on_where_it_was():
    whole, first, second = (actions(action_patience=3, max_actions=1) for _ in range(3))
    steps = [ESS] * 2 + [ESS] * 3 + [{}] * 4 + [ESS] * 4
    begun(first, steps[:4])
    second.load(first.state())
    begun(whole, steps)
    begun(second, steps[4:], first=5)
    assert second.state() == whole.state() and whole.exhausted


@pytest.mark.parametrize("change", [
    {"begun": None}, {"begun": "x"}, {"begun": [1.5]}, {"begun": [float("inf")]}, {"exhausted": 1}, {"exhausted": None},
    {"persistence": None}, {"persistence": []}, {"persistence": {}}, {"persistence": {"active": "x"}},
])  # fmt: skip
def test_a_state_of_something_else_is_refused(change):
    with pytest.raises(CheckpointStateError, match="cannot be read"):
        actions().load(actions().state() | change)
    for nothing in ({}, [], None, "x", -1):
        with pytest.raises(CheckpointStateError):
            actions().load(nothing)
