"""What a batch can teach: groups with equal rewards, responses without an advantage, cut and repeated responses.

A group is the responses to one prompt. Rewards are judged, because verl's division by a standard deviation of 0 makes
advantages of rounding errors: 0.06 for seven rewards of 0.7.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from verl_precision.base.mergeable import Mean, StatisticSet

# Rewards that differ by this share of the largest one, or less, are equal: some units in float32's last place.
ROUNDING = 4 * torch.finfo(torch.float32).eps
# verl's estimators whose advantages are 0, up to rounding, where all rewards of a group are equal.
COMPARES_GROUPS = "grpo grpo_vectorized grpo_passk rloo rloo_vectorized reinforce_plus_plus_baseline opo gpg".split()
Tensors = Sequence[Tensor]


class Signal(StatisticSet):
    """All `signal/...` metrics, mergeable; those of groups only where a prompt has two responses or more."""

    prefix = "signal/"

    @classmethod
    def of_batch(
        cls, prompts: Sequence[str], rewards_B: Tensor, advantages: Tensors, tokens: Tensors, longest: int, kind: str
    ) -> Self:
        """Measure whole groups, from prompt, reward, advantages and tokens of each response; one of `longest` was cut.

        If `kind` (verl's `adv_estimator`) does not compare groups, only advantages of 0, or equal rewards of the
        whole batch, leave a response without an advantage.
        """
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows.setdefault(prompt, []).append(row)
        groups = [group for group in rows.values() if len(group) > 1]
        equal = [group for group in groups if _equal(rewards_B[group])]
        silent = {row for row, each in enumerate(advantages) if not each.any()}
        if kind in COMPARES_GROUPS:
            silent.update(*equal)
        if len(prompts) > 1 and _equal(rewards_B):
            silent.update(range(len(prompts)))
        distinct = [len({tokens[row].numpy().tobytes() for row in group}) / len(group) for group in groups]
        shares = {
            "equal_reward_groups": (len(equal), len(groups)),
            "zero_advantage_responses": (len(silent), len(prompts)),
            "distinct_responses": (sum(distinct), len(groups)),
            "truncated_fraction": (sum(len(response) >= longest for response in tokens), len(prompts)),
        }
        return cls.on_cpu({name: Mean(*map(torch.tensor, share)) for name, share in shares.items()})


def _equal(rewards: Tensor) -> bool:
    """Return whether rewards are equal, up to float32's rounding."""
    return bool(rewards.max() - rewards.min() <= ROUNDING * rewards.abs().max())
