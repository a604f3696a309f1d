"""The learning rate of each update, scaled by the effective sample size of its importance weights: VCPO.

    η ← η √min(1, e/e₀),   e = (Σρ)² / (B Σρ²) over the B responses of the mini-batch, on all ranks

ρ is the weight of a response, as the loss reports it: the paper's weight with `pg_seq_is`, the truncated weight of a
loss with C, the mean over the tokens of a response with token-level weights. e₀ is the setting, 1 in the authors'
recipes for mathematics. The root is for optimizers like Adam. The paper's minimum-variance baseline is not implemented.

Source: https://arxiv.org/abs/2602.17616, and https://github.com/mit-han-lab/vcpo (`ess_scaling`, rule sqrt).
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from verl.utils.device import get_device_name

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.engine.build import EnginePart
from verl_precision.losses.metrics import ESS, WeightStatistic, effective_share


class ScaledLearningRate:
    """Scales the learning rate of one update at a time; the schedule and checkpoints have the unscaled rate.

    AdamW's weight decay scales with the rate. The rate is 0 if an update has no response, or only weights of 0.
    """

    def __init__(self, base: float) -> None:
        self.base = base  # e₀
        self._found: list[WeightStatistic] = []  # weights of the current update
        self._factors: list[float] = []  # of each update since the last metrics

    def watched(self, data: Any, loss_function: Callable) -> Callable:
        """Return verl's loss function for one update, wrapped to keep the weights that the loss reports."""
        self._found = found = list[WeightStatistic]()

        def loss_and_weights(*args: Any, **kwargs: Any) -> Any:
            result = loss_function(*args, **kwargs)
            if "model_output" in kwargs and ESS in result[1]:  # otherwise: a call of top-k distillation
                found.extend(result[1][ESS].values)
            return result

        return loss_and_weights

    @contextlib.contextmanager
    def around_step(self, engine: Any) -> Iterator[None]:
        """Scale the rates of an engine's optimizer during the block; refuse a loss that reported no weights."""
        factor, groups = self._factor(engine.get_data_parallel_group()), engine.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._factors.append(factor)

    def take_metrics(self) -> dict[str, float]:
        """Return the mean factor over the updates since the last call."""
        factors, self._factors = self._factors, []
        return {"precision/learning_rate_factor": sum(factors) / len(factors)} if factors else {}

    def _factor(self, ranks: dist.ProcessGroup | None) -> float:
        if not self._found:
            raise ConfigurationError(
                "the loss reported no importance weights, and the effective sample size is computed from them",
                setting="fsdp_config.learning_rate_ess_base",
                value=self.base,
                allowed="a loss with weights: estimator=pg_seq_is, pg_seq_tis, pg_seq_mis, or grpo with weights",
                remedy="Choose one of them, or leave out the preset learning_rate.",
            )
        sums = torch.stack([each.responses for each in self._found]).sum(dim=0).to(get_device_name())
        dist.all_reduce(sums, group=ranks)
        fraction = effective_share(*sums.cpu())
        return 0.0 if math.isnan(fraction) else math.sqrt(min(1.0, fraction / self.base))


def scale_learning_rate(engine: Any, module: nn.Module) -> nn.Module:
    """Give an engine a scaled learning rate, with e₀ from its config: a step of an engine's build."""
    rate = ScaledLearningRate(engine.engine_config.learning_rate_ess_base)
    engine.parts.append(EnginePart(rate.watched, rate.around_step, take_metrics=rate.take_metrics))
    return module
