"""The shadow: the actor's weights a second time, for a no-grad forward in the rollout's dtype; and `rounded_weights`.

log r = α + β with β = log π_train - log π_shadow (same weights, two precisions) and α = log π_shadow - log μ (what the
policy did). See docs/metrics.md.

The copy is sharded by verl's own builder with the other dtype as its compute dtype, so that nothing of FSDP is touched
(`add_shadow` in integration/engine/build.py); its shards are refreshed from the actor's after every update.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.loss_scaling import local_part

ROUNDED_TO = "verl_precision_rounded_to"  # in a batch: the dtype that the weights are rounded to for its forward
# In a model's output: the shadow's log-probs, and the training's own where the log-probs have the shadow's values.
OF_SHADOW, OF_TRAINING = "verl_precision_shadow_log_probs", "verl_precision_training_log_probs"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient_of: Tensor) -> Tensor:
        return value.to(gradient_of.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        return None, gradients[0]


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return x̃ = `value` in the dtype of `gradient_of`, with ∂x̃/∂gradient_of = 1, also where x̃ is not finite."""
    return _StraightThrough.apply(value.detach(), gradient_of)


def loss_beside_shadow(loss_function: Callable, shadow_log_probs: Tensor, in_ratio: bool) -> Callable:
    """Return verl's loss function on an output with the shadow's log-probs (nested), as `OF_SHADOW`.

    `in_ratio`: the log-probs themselves have the shadow's values, and the training's own are there as `OF_TRAINING`.
    """

    def loss(*args: Any, **kwargs: Any) -> Any:
        if "model_output" not in kwargs and in_ratio:
            raise ConfigurationError(
                "top-k distillation takes its loss from logits, which the shadow does not give",
                setting="fsdp_config.shadow.ratio_source",
                value="shadow",
                allowed="training",
                remedy="Set ratio_source=training, or distillation without use_topk.",
            )
        if "model_output" in kwargs:
            output = {**kwargs["model_output"], OF_SHADOW: shadow_log_probs}
            if in_ratio:
                output[OF_TRAINING] = own = output["log_probs"]
                values = straight_through(shadow_log_probs.values(), own.values())  # type: ignore[operator]
                offsets = shadow_log_probs.offsets()  # type: ignore[attr-defined]
                output["log_probs"] = torch.nested.nested_tensor_from_jagged(values, offsets)
            kwargs["model_output"] = output
        return loss_function(*args, **kwargs)

    return loss


@dataclasses.dataclass(eq=False)
class ShadowModel:
    """The actor's weights in another dtype, sharded alike."""

    engine: Any  # like the actor's engine, with this model: evaluation mode, no gradients
    stale: bool = False  # have the actor's weights changed since they were copied?

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.engine.module  # type: ignore[no-any-return]

    def outdate(self) -> None:
        """Note that the actor's weights have changed; what a forward has gathered of the old ones is dropped."""
        self.stale = True
        reshard(self.module)

    @torch.no_grad()
    def step(self, actor: nn.Module, micro_batch: Any, loss_function: Any = None) -> Any:
        """Do a forward step with this rank's shards of the actor's weights, rounded into the copy if they changed."""
        if self.stale:
            reshard(actor)
            for mine, theirs in zip(self.module.parameters(), actor.parameters(), strict=True):
                local_part(mine).copy_(local_part(theirs))
            self.stale = False
        return self.engine.verified_step(micro_batch, loss_function, True)


def reshard(module: nn.Module) -> None:
    """Drop the gathered weights that a forward left behind: FSDP2 hides the root's shards, FSDP1 computes from them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._is_root is not None:  # it has run before
            handle = part._handle
            if handle is not None and handle.uses_sharded_strategy:  # one rank alone gathers nothing
                handle.reshard(True)


@contextlib.contextmanager
@torch.no_grad()
def rounded_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, FP32 weights hold the nearest numbers of `dtype`; afterwards they are what they were, to the bit.

    FP32 weights move by less than half of a BF16 spacing for many steps, all of them at once; a BF16 rollout sees none
    of it. The module may be sharded by FSDP1 or FSDP2; its shards are copied once while this lasts.
    """
    reshard(module)
    shards = [local_part(weight) for weight in module.parameters() if weight.dtype == torch.float32]
    kept = [shard.clone() for shard in shards]
    try:
        for shard in shards:
            shard.copy_(shard.to(dtype))
        yield
    finally:
        reshard(module)
        for shard, own in zip(shards, kept, strict=True):
            shard.copy_(own)
