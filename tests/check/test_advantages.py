"""Estimators that verl's V1 trainer cannot compute are refused, and no others: verl itself is asked."""

import inspect
import re

import numpy
import pytest
import torch
from composer import compose_verl
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_precision.check.advantages import not_computable

ROLLOUT = "actor_rollout_ref.rollout.name=vllm"
REWARD_KEYS = "+algorithm.gdpo_reward_keys=[accuracy_reward,format_reward]"


def handed() -> DataProto:
    """Two responses to one prompt, with all that V1's `_compute_advantage` has when it asks for the advantages."""
    fetched = re.search(r"fields = \[(.+?)\]", inspect.getsource(PPOTrainer._compute_advantage)).group(1)
    names = set(re.findall(r'"(\w+)"', fetched)) - {"uid"}
    assert {"rm_scores", "old_log_probs", "response_mask"} <= names
    batch = {name: torch.ones(2, 3) for name in names | {"token_level_scores", "token_level_rewards"}}
    data = DataProto(batch=TensorDict(batch, batch_size=2))
    data.non_tensor_batch["uid"] = numpy.array(["prompt", "prompt"], dtype=object)
    return data


@pytest.mark.parametrize("name", sorted(map(str, ADV_ESTIMATOR_REGISTRY)))
def test_what_verl_cannot_compute_is_refused(name):
    config = compose_verl(ROLLOUT, f"algorithm.adv_estimator={name}", REWARD_KEYS)
    refused = [error.setting for error in not_computable(config)]
    keys = ["prompt_0_0", "prompt_1_0"]
    try:
        compute_advantage_for_multi_trajectories(handed(), keys, name, config=config.algorithm, num_repeat=2)
        computed = True
    except (AssertionError, KeyError, TypeError):  # one for each way in which verl misses an input
        computed = False
    assert refused == ([] if computed else ["algorithm.adv_estimator"])


def test_verls_older_trainer_is_not_concerned():
    config = compose_verl(ROLLOUT, "algorithm.adv_estimator=remax", "trainer.use_v1=False")
    assert list(not_computable(config)) == []
