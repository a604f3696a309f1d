"""A remedy begins after further evidence, for what it cures, and beside no fault; and what it does."""

import runpy
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from monitored import trainer_of
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base

from verl_precision.base.errors import CheckpointStateError
from verl_precision.mismatch.alarm import ADVICE, MismatchAlarm, first_alarms
from verl_precision.tools.actions.learning_rate import LOWER_RATE
from verl_precision.tools.actions.remedy import CURABLE, FAULTS, Remedy
from verl_precision.tools.actions.rescue import Action
from verl_precision.tools.runs.read import read_metrics

RECORDED = Path(__file__).parents[2] / "mismatch" / "recorded"

ESS = {"low_effective_sample_size": 1}
# Responses whose weights have an effective sample of 2 in 16, and of 15 in 16, before any is masked.
SICK = {"mismatch/sequence_ess": 2.0, "mismatch/responses": 16, "actor/is_weight_ess_fraction": 2 / 16}
WELL = {"mismatch/sequence_ess": 15.0, "mismatch/responses": 16, "actor/is_weight_ess_fraction": 15 / 16}
MASKED = {"actor/is_weight_ess_fraction": 1.0, "rollout_corr/kept_response_fraction": 0.1}  # what the loss sees


def remedy(kind: str = "rescue", **alarm) -> Remedy:
    correction = {"algorithm": {"rollout_correction": {"rollout_rs": None, "bypass_mode": False}}}
    return Remedy(trainer_of(correction, {"mismatch": {"alarm": {"on_alarm": kind, **alarm}}}))


def begun(made: Remedy, steps: list[dict[str, int]], first: int = 1) -> list[Action]:
    found = [made.decide(step, active) for step, active in enumerate(steps, first)]
    return [each for each in found if each is not None]


def test_it_wants_as_many_further_steps_as_it_is_patient():
    assert begun(remedy(), [{}] * 4 + [ESS] * 4) == []
    assert begun(remedy(), [{}] * 4 + [ESS] * 9) == [Action("low_effective_sample_size", 9, 1)], "once"
    assert begun(remedy(action_patience=1), [ESS]) == [Action("low_effective_sample_size", 1, 1)]


@pytest.mark.parametrize("fault", FAULTS)
def test_beside_a_fault_nothing_is_done(fault):
    assert begun(remedy(), [{**ESS, fault: 1}] * 20) == []


def test_every_alarm_but_an_extreme_gap_is_curable_or_a_fault():
    """BF16 runs of the paper begin with extreme gaps."""
    assert set(ADVICE) - {*CURABLE, *FAULTS} == {"extreme_prob_gap"} and not {*CURABLE} & {*FAULTS}


def test_trouble_began_with_the_first_of_its_alarms():
    (action,) = begun(remedy(), [{"k3_growth": 7, "gap_growth": 5}] * 5, first=20)
    assert action == Action("k3_growth", 24, 5)


def test_it_ends_after_as_many_steps_without_an_alarm_and_begins_again():
    made = remedy(action_patience=2)
    assert len(begun(made, [ESS, ESS])) == 1 and made.active
    begun(made, [{}, {}], first=3)
    assert not made.active
    assert [each.step for each in begun(made, [ESS, ESS], first=5)] == [6]


FINE = [f"mismatch/recorded/sanity_arithmetic_{each}.jsonl" for each in ("bf16", "fp16")]
FINE += [f"data/quickstart/{each}/metrics.jsonl" for each in ("bf16", "fp16")]


@pytest.mark.parametrize("path", FINE)
def test_recorded_runs_that_were_fine_are_left_alone(path, root):
    assert replayed(read_metrics(root / "tests" / path)) == []


def test_a_seeded_collapse_would_be_acted_on_before_the_reward_falls():
    """At step 61; the alarm cannot tell that noise in the weights is the cause, which no other precision cures."""
    assert replayed(read_metrics(RECORDED / "seeded_collapse.jsonl")) == [Action("gap_growth", 43, 31)]


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
    alarm, made, found = MismatchAlarm(), remedy(), []
    for row in rows:
        alarm.update(int(row["step"]), row)
        found.append(made.decide(int(row["step"]), alarm.active_since))
    return [each for each in found if each is not None]


def test_a_resumed_run_goes_on_where_it_was():
    whole, first, second = (remedy(action_patience=3) for _ in range(3))
    steps = [ESS] * 5 + [{}] * 4 + [ESS] * 4
    begun(first, steps[:4])
    second.load(first.state())
    assert len(begun(whole, steps)) == 2 and len(begun(second, steps[4:], first=5)) == 1
    assert second.state() == whole.state()


@pytest.mark.parametrize("state", [
    {}, [], None, "x", -1, *({"persistence": each} for each in (None, [], {}, {"active": "x"}, {"recent": [1.5]})),
])  # fmt: skip
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(CheckpointStateError):
        remedy().load(state)


def run_step(made: Remedy, step: int, metrics: dict) -> int | None:
    """Judge a step's metrics as verl's trainer has it; return what the metrics say of the remedy."""
    judge = lambda batch, metrics, global_steps: made._trainer.monitor.judge(global_steps, metrics)  # noqa: E731
    made._compute_metrics(judge, None, metrics, global_steps=step)
    return metrics.get(f"alarm/{made.kind}")


def left_by_verl(made: Remedy) -> list[int]:
    """Pass three responses with ratios of 1, 4 and 1/4, of tokens with larger ones, through verl's correction."""
    log_ratio = torch.tensor([[2.0, -2.0], [0.0, 1.4], [-1.4, 0.0]])
    fields = {"old_log_probs": log_ratio - 3, "rollout_log_probs": torch.full((3, 2), -3.0)}
    data = DataProto.from_dict({**fields, "response_mask": torch.ones(3, 2)})
    correct, algorithm = trainer_base.compute_rollout_correction_and_add_to_batch, made._trainer.config.algorithm
    found, _ = made._compute_advantage(lambda data, metrics: correct(data, algorithm.rollout_correction), data, {})
    assert algorithm.rollout_correction.rollout_rs is None, "the run's own setting is there again"
    return found.batch["response_mask"].sum(dim=1).int().tolist()


def test_a_lower_rate_is_asked_of_the_worker_until_the_alarm_has_recovered(tmp_path, caplog):
    """The alarm speaks at step 5, and from there five steps are the patience; so it ends, from step 19 on."""
    made, asked, said = remedy("lower_learning_rate"), [], []
    for step in range(1, 26):
        batch = SimpleNamespace(extra_info={})
        made._update_actor(lambda batch, metrics: batch, batch, {})
        asked.append(LOWER_RATE in batch.extra_info)
        said.append(run_step(made, step, dict(SICK if step <= 14 else WELL)))
        made._trainer.monitor.save(tmp_path, {})
        made = remedy("lower_learning_rate")  # each step in a start of its own
        made._trainer.monitor.load(tmp_path)
    assert said == [0] * 9 + [1] * 14 + [0] * 2, "begun by step 9, ended by step 23"
    assert asked == [bool(each) for each in said]
    spoken = [message for message in caplog.messages if message.startswith("ACTION lower_learning_rate")]
    assert len(spoken) == 2 and "step 9" in spoken[0] and "step 23" in spoken[1]


def test_a_mask_has_verl_leave_out_whole_responses_beyond_c_until_the_alarm_has_recovered():
    """It is judged by the sample before the mask: that after it looks healthy at once, and would end it."""
    made, left, said = remedy("mask"), [], []
    for step in range(1, 26):
        left.append(left_by_verl(made))
        metrics = dict(SICK if step <= 14 else WELL) | (MASKED if left[-1] != [2, 2, 2] else {})
        said.append(run_step(made, step, metrics))
    assert said == [0] * 9 + [1] * 14 + [0] * 2
    assert left == [[2, 0, 0] if each else [2, 2, 2] for each in said], "1/3 <= ratio of the response <= 3"


def test_the_setting_is_there_again_after_an_error():
    made = remedy("mask", action_patience=1)
    begun(made, [ESS])
    correction = made._trainer.config.algorithm.rollout_correction
    with pytest.raises(ZeroDivisionError):
        made._compute_advantage(lambda batch, metrics: 1 / (correction.rollout_rs != "seq_sum_k1"), None, {})
    assert correction.rollout_rs is None


@pytest.mark.parametrize("kind", ["log", "stop"])
def test_a_run_that_does_not_act_has_no_metric_of_it(kind):
    made = remedy(kind)
    for step in range(1, 26):
        run_step(made, step, metrics := dict(SICK))
        assert not {each for each in metrics if each.startswith("alarm/")} - {"alarm/active_count"}
    assert left_by_verl(made) == [2, 2, 2]
