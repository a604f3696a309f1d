"""What an alarm that acts does to a run, step by step, and what it says; a rescue: test_rescue.py."""

import logging
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from test_run_monitor import MINIMAL
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base

from verl_precision.integration.trainer.run_monitor import RunMonitor
from verl_precision.mismatch.settings import settings_of
from verl_precision.tools.actions.learning_rate import LOWER_RATE

# Responses whose weights have an effective sample of 2 in 16, and of 15 in 16, before any is masked.
SICK = {"mismatch/sequence_ess": 2.0, "mismatch/responses": 16, "actor/is_weight_ess_fraction": 2 / 16}
WELL = {"mismatch/sequence_ess": 15.0, "mismatch/responses": 16, "actor/is_weight_ess_fraction": 15 / 16}
MASKED = {"actor/is_weight_ess_fraction": 1.0, "rollout_corr/kept_response_fraction": 0.1}  # what the loss sees


def config_with(kind: str, **alarm):
    correction = {"algorithm": {"rollout_correction": {"rollout_rs": None, "bypass_mode": False}}}
    return OmegaConf.merge(MINIMAL, correction, {"mismatch": {"alarm": {"on_alarm": kind, **alarm}}})


def judge_of(config) -> RunMonitor:
    return RunMonitor(config, settings_of(config))


def left_by_verl(judge: RunMonitor, config) -> list[int]:
    """Pass three responses with ratios of 1, 4 and 1/4, of tokens with larger ones, through verl's correction."""
    log_ratio = torch.tensor([[2.0, -2.0], [0.0, 1.4], [-1.4, 0.0]])
    data = DataProto.from_dict(
        {
            "old_log_probs": log_ratio - 3,
            "rollout_log_probs": torch.full((3, 2), -3.0),
            "response_mask": torch.ones(3, 2),
        }
    )
    with judge.acting.masking(config):
        found, _ = trainer_base.compute_rollout_correction_and_add_to_batch(data, config.algorithm.rollout_correction)
    return found.batch["response_mask"].sum(dim=1).int().tolist()


def test_a_lower_rate_is_asked_of_the_worker_until_the_alarm_has_recovered(tmp_path, caplog):
    """The alarm speaks at step 5, and from there five steps are the patience; so it ends, from step 19 on."""
    config = config_with("lower_learning_rate")
    judge, asked, acting = judge_of(config), [], []
    for step in range(1, 26):
        batch = SimpleNamespace(extra_info={}, tags=[])
        judge.ask_the_worker(batch, step, 0)
        asked.append(LOWER_RATE in batch.extra_info)
        metrics = dict(SICK if step <= 14 else WELL)
        judge.judge(step, metrics)
        acting.append(metrics["alarm/lower_learning_rate"])
        judge.save(str(tmp_path), metrics)
        judge = judge_of(config)
        judge.load(str(tmp_path))
    assert acting == [0] * 9 + [1] * 14 + [0] * 2, "begun by step 9, ended by step 23"
    assert asked == [bool(each) for each in acting]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("ACTION")]
    assert said == [
        "ACTION lower_learning_rate at step 9: low_effective_sample_size since step 1",
        "ACTION lower_learning_rate ended at step 23: the alarm has recovered",
    ]


def test_a_mask_has_verl_leave_out_whole_responses_beyond_c_until_the_alarm_has_recovered():
    """It is judged by the sample before the mask: that after it looks healthy at once, and would end it."""
    config = config_with("mask")
    judge, left, acting = judge_of(config), [], []
    for step in range(1, 26):
        left.append(left_by_verl(judge, config))
        metrics = dict(SICK if step <= 14 else WELL) | (MASKED if left[-1] != [2, 2, 2] else {})
        judge.judge(step, metrics)
        acting.append(metrics["alarm/mask"])
    assert acting == [0] * 9 + [1] * 14 + [0] * 2
    assert left == [[2, 0, 0] if each else [2, 2, 2] for each in acting], "1/3 <= ratio of the response <= 3"
    assert config.algorithm.rollout_correction.rollout_rs is None, "the run's own setting is there again"


def test_the_setting_is_there_again_after_an_error():
    config = config_with("mask", action_patience=1, persist_steps=1)
    judge = judge_of(config)
    judge.judge(1, dict(SICK))
    with pytest.raises(ZeroDivisionError), judge.acting.masking(config) as masked:
        assert masked and config.algorithm.rollout_correction.rollout_rs == "seq_sum_k1"
        raise ZeroDivisionError
    assert config.algorithm.rollout_correction.rollout_rs is None


def test_it_says_when_it_gives_up(caplog):
    config = config_with("mask", action_patience=1, persist_steps=1, max_actions=1)
    judge = judge_of(config)
    for step, metrics in enumerate([SICK, *[WELL] * 4, SICK, SICK], start=1):
        judge.judge(step, dict(metrics))
    assert caplog.messages[-1].startswith("ACTION mask is due at step 6, and max_actions allows no more")
    assert not judge.acting.under_way("mask")


@pytest.mark.parametrize("kind", ["log", "stop"])
def test_a_run_that_does_not_act_has_no_metric_of_it(kind, caplog):
    caplog.set_level(logging.WARNING)
    config = config_with(kind)
    judge = judge_of(config)
    for step in range(1, 26):
        metrics = dict(SICK)
        judge.judge(step, metrics)
        assert not {each for each in metrics if each.startswith("alarm/")} - {"alarm/active_count"}
    assert left_by_verl(judge, config) == [2, 2, 2]
