"""A session of an agent loop is one response, however many outputs it returns."""

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base, utils

from verl_precision.integration.trainer.session_advantages import advantages_by_session

# Three sessions of one prompt with rewards 0, 1, 0; the second returns three outputs, its last one stands first.
KEYS = ["u_0_0", "u_1_2", "u_1_0", "u_1_1", "u_2_0"]
REWARDS = [0.0, 1.0, 1.0, 1.0, 0.0]


def advantages(estimator: str, keys=KEYS, rewards=REWARDS) -> list[float]:
    scores = torch.tensor(rewards).unsqueeze(-1) * torch.tensor([0.0, 1.0])
    tensors = {"token_level_rewards": scores, "response_mask": torch.ones_like(scores)}
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(["u"] * len(keys), dtype=object)})
    # under the name by which verl's trainer calls it
    data = trainer_base.compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=estimator, num_repeat=3, norm_adv_by_std_in_grpo=False, config={}
    )
    assert torch.equal(data.batch["advantages"][:, 0], data.batch["advantages"][:, 1])
    return data.batch["advantages"][:, 0].tolist()


def test_each_session_counts_once_with_rloo():
    with advantages_by_session():
        assert advantages("rloo") == pytest.approx([-0.5, 1, 1, 1, -0.5])
    assert advantages("rloo") == pytest.approx([-0.75, 0.5, 0.5, 0.5, -0.75]), "verl's own, for whom nothing changes"


def test_other_estimators_and_single_outputs_are_verls_own():
    theirs = utils.compute_advantage_for_multi_trajectories.__wrapped__
    with advantages_by_session():
        assert advantages("grpo") == pytest.approx([-1 / 3, 2 / 3, 2 / 3, 2 / 3, -1 / 3])
        found = advantages("rloo", ["u_0_0", "u_1_0", "u_2_0"], [0.0, 1.0, 0.0])
    assert found == pytest.approx([-0.5, 1, -0.5]) and theirs is not utils.compute_advantage_for_multi_trajectories
