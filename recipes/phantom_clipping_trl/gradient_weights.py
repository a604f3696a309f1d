"""The weights of the gradient of unclipped tokens, r |A|, with and without beta: does beta distort the advantage?

with beta:     r = π / μ         without: r = shadow / μ
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.base.mergeable import Correlation, Mean, StatisticSet


@dataclass(frozen=True)
class GradientWeightStatistics(StatisticSet):
    """`weights/with_over_without` for both signs of the advantage, and the correlation of both weights; mergeable."""

    prefix: ClassVar[str] = "weights/"

    @classmethod
    @torch.no_grad()
    def of_batch(cls, trainer_log_probs: Tensor, batch: dict[str, Tensor]) -> Self:
        """Measure a micro-batch of [B, T] tensors, by the names of `examples/trl_grpo.py`."""
        valid = batch["response_mask"].bool()
        pi, shadow, mu, advantages = (
            tensor[valid].double()
            for tensor in (trainer_log_probs, batch["shadow"], batch["rollout_log_probs"], batch["advantages"])
        )
        given, without = ((log_probs - mu).exp() * advantages.abs() for log_probs in (pi, shadow))
        found = {}
        for name, chosen in (("positive_advantage", advantages > 0), ("negative_advantage", advantages < 0)):
            found[f"with_over_without_{name}"] = Mean(given[chosen].sum(), without[chosen].sum())
        d, n = given - without, given.new_tensor(float(len(given)))
        sums = without.sum(), without.dot(without), d.sum(), d.dot(d), without.dot(d)
        return cls.on_cpu({**found, "correlation": Correlation(n, *sums)})
