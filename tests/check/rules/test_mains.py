"""What verl's V1 trainer does not do: shown on verl's own functions, with the fields that its trainer gives them."""

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_precision.check.rules.mains import NOT_GIVEN

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
