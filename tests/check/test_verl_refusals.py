"""verl's typed configs are asked for every block that a run builds, and the setting at fault is named."""

import numpy as np
import pytest
import torch
from cases import cases
from composer import compose_verl
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_precision.check.rules.features import NOT_GIVEN
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.check.verl_refusals import mistyped, refusals

MODEL = "actor_rollout_ref"
BATCHES = (f"{MODEL}.actor.ppo_micro_batch_size_per_gpu=8", f"{MODEL}.ref.log_prob_micro_batch_size_per_gpu=8")
ROLLOUT = (f"{MODEL}.rollout.name=vllm", f"{MODEL}.rollout.log_prob_micro_batch_size_per_gpu=8")
PLAIN = ("algorithm.adv_estimator=grpo", *ROLLOUT, *BATCHES)


def composed(words: str):
    return compose_verl(*PLAIN, *words.split(), return_hydra_config=True)


@pytest.mark.parametrize(("words", "setting"), cases(__file__, "blocks"))
def test_verl_refuses_a_block_that_is_enabled_and_what_it_accepts_or_does_not_build_is_left_alone(words, setting):
    found = refusals(composed(words))
    assert [error.setting.endswith(setting) for error in found] == [True] * (setting is not None)


def test_what_a_rule_says_of_this_packages_config_is_said_once():
    config = composed("+precision=fp16 actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    faults = find_faults(config, Environment(refusals=refusals(config)))
    assert [fault.name for fault in faults if fault.severity == "error"] == ["engine-settings"]


def test_a_variable_of_a_script_that_is_not_set_is_no_switch_on():
    assert mistyped(composed("data.return_raw_chat=")) == []
    assert [error.setting for error in mistyped(composed("data.train_batch_size="))] == ["data.train_batch_size"]
    assert [error.setting for error in mistyped(composed("distillation.nnodes=one"))] == ["distillation.nnodes"]


KEYS = [f"prompt_{session}_0" for session in range(4)]


def advantages(name: str) -> torch.Tensor:
    """Return the advantages of four responses to one prompt, as `_compute_advantage` asks for them."""
    rewards = torch.zeros(4, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    ones = torch.ones(4, 3)
    tensors = {"token_level_rewards": rewards, "response_mask": ones, "values": 0 * ones, "old_log_probs": -ones}
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(["prompt"] * 4, dtype=object)})
    config = AlgoConfig(adv_estimator=name, gdpo_reward_keys=["accuracy"])
    given = {"batch_keys": KEYS, "adv_estimator": name, "num_repeat": 4, "config": config}
    return compute_advantage_for_multi_trajectories(data, **given).batch["advantages"]


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_the_named_estimators_fail_with_what_the_v1_trainer_gives_and_no_other_does(name):
    if name in NOT_GIVEN:
        with pytest.raises((TypeError, KeyError, AssertionError)):
            advantages(name)
    else:
        assert advantages(name).isfinite().all()
