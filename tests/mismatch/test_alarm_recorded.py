"""The alarm on recorded runs of the real stack (docs/log.md): a seeded collapse, and two runs that were fine."""

from pathlib import Path

import pytest

from verl_precision.mismatch.alarm import MismatchAlarm
from verl_precision.mismatch.alarm_settings import AlarmSettings
from verl_precision.runs.read import read_metrics
from verl_precision.runs.results import REWARD

RECORDED = Path(__file__).parent / "recorded"


def alarms(name: str, **settings: int) -> list[tuple[int, str]]:
    alarm = MismatchAlarm(AlarmSettings(**settings))
    rows = read_metrics(RECORDED / f"{name}.jsonl")
    return [(int(row["step"]), found.name) for row in rows for found in alarm.update(int(row["step"]), row)]


def test_a_seeded_collapse_is_caught_before_the_reward_falls():
    """From step 31 on, weights reached the rollout with noise that grew by 1.35 a step; default settings."""
    reward = {int(row["step"]): row[REWARD] for row in read_metrics(RECORDED / "seeded_collapse.jsonl")}
    healthy = min(reward[step] for step in range(25, 41))
    fall = next(step for step in range(41, 65) if reward[step] < healthy - 1)
    found = alarms("seeded_collapse")
    assert [name for _, name in found] == ["gap_growth", "k3_growth", "policies_differ"]
    assert 31 < found[0][0] < found[1][0] < fall - 10, "found in time to act, and not before there was anything"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("baseline_steps", [5, 10, 30])
def test_runs_that_were_fine_raise_none(precision, baseline_steps):
    assert alarms(f"sanity_arithmetic_{precision}", baseline_steps=baseline_steps) == []
