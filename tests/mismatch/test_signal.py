"""What a batch can teach: by hand, and beside verl's own advantages."""

import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.signal import COMPARES_GROUPS, Signal


def signal(prompts: str, rewards: list, advantages=None, texts=None, estimator="rloo") -> Signal:
    """Measure responses of at most 4 tokens: a letter is a prompt, or a token."""
    given = [torch.tensor([float(each), 0.0]) for each in (advantages or [1.0] * len(prompts))]
    tokens = [torch.tensor([ord(letter) for letter in text]) for text in texts or ["a"] * len(prompts)]
    return Signal.of_batch(list(prompts), torch.tensor(rewards), given, tokens, 4, estimator)


def test_by_hand_and_merged():
    """Of three groups one has equal rewards; one response of another has no advantage; two of seven are cut."""
    batch = "aaabbcc", [0, 1, 0.5, 2, 2, 0, 1], [1, 1, 0, 1, 1, 1, 1], ["ab", "ab", "abc", "abcd", "a", "a", "abcde"]
    found = signal(*batch).metrics()
    groups = {"signal/equal_reward_groups": 1 / 3, "signal/distinct_responses": (2 / 3 + 1 + 1) / 3}
    assert found == pytest.approx(groups | {names.ZERO_ADVANTAGE: 3 / 7, "signal/truncated_fraction": 2 / 7})
    first, second = (signal(*(part[rows] for part in batch)) for rows in (slice(5), slice(5, 7)))
    assert first.merge(second).metrics() == pytest.approx(found)


@pytest.mark.parametrize(("prompts", "rewards", "estimator", "equal", "silent"), [
    ("aab", [0.1, 0.1, 5.0], "rloo", 1, 2 / 3),
    ("aab", [0.3, 0.3 + 3e-8, 5.0], "rloo", 1, 2 / 3),  # float32's rounding
    ("aab", [1.0, 1.00001, 5.0], "rloo", 0, 0), ("aab", [math.nan, math.nan, 5.0], "rloo", 0, 0),
    ("aabb", [1.0, 1.0, 0.0, 0.0], "gae", 1, 0),  # a critic still learns from what differs between the groups
    ("aabb", [1.0] * 4, "gae", 1, 1),
    ("abc", [1.0, 0.0, 1.0], "grpo", None, 0), ("abc", [1.0] * 3, "grpo", None, 1),  # there is no group
])  # fmt: skip
def test_equal_rewards_leave_no_advantage_where_they_are_compared(prompts, rewards, estimator, equal, silent):
    found = signal(prompts, rewards, estimator=estimator).metrics()
    assert found.get("signal/equal_reward_groups") == equal
    assert found[names.ZERO_ADVANTAGE] == pytest.approx(silent)


@pytest.mark.parametrize("estimator", COMPARES_GROUPS)
def test_verls_estimators_give_equal_rewards_no_advantage_but_rounding(estimator):
    """grpo divides a rounding error by a deviation of 0."""
    prompts, rewards = [*"aaaaaaabbbbbbb"], torch.tensor([0.1] * 7 + [0.7] * 7)
    given = {"token_level_rewards": rewards[:, None] * torch.tensor([0.0, 1.0]), "response_mask": torch.ones(14, 2)}
    given |= {"index": np.array(prompts, dtype=object), "config": OmegaConf.create({"norm_adv_by_std_in_grpo": True})}
    advantages = ADV_ESTIMATOR_REGISTRY[estimator](**given)[0]
    assert advantages.abs().max() < 0.1 and (advantages.any() or estimator != "grpo")
    found = Signal.of_batch(prompts, rewards, list(advantages), [torch.zeros(1)] * 14, 4, estimator)
    assert found.metrics()[names.ZERO_ADVANTAGE] == 1
