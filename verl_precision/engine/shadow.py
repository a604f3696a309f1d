"""The shadow, a second copy of the actor's weights for a no-grad forward in the rollout's dtype; `rounded_weights`.

log r = α + β with β = log π_train - log π_shadow (same weights, two precisions) and α = log π_shadow - log μ (the
change of the policy). See docs/metrics.md.

verl's own builder shards the copy, with the other dtype as compute dtype, so that FSDP itself is unchanged
(`add_shadow` in integration/engine/build.py). The copy's shards are refreshed from the actor's after every update.
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
from verl_precision.engine.settings import WORDS
from verl_precision.losses.ratios import straight_through

ROUNDED_TO = "verl_precision_rounded_to"  # key in a batch: the dtype to which weights are rounded for the forward
# Keys in a model's output: the shadow's log-probs, and the training's own if `log_probs` has the shadow's values.
OF_SHADOW, OF_TRAINING = "verl_precision_shadow_log_probs", "verl_precision_training_log_probs"


def loss_beside_shadow(loss_function: Callable, shadow_log_probs: Tensor, in_ratio: bool) -> Callable:
    """Return verl's loss function, called with an output that has the shadow's log-probs (nested) as `OF_SHADOW`.

    With `in_ratio`, `log_probs` has the shadow's values, and the training's own values are under `OF_TRAINING`.
    """

    def loss(*args: Any, **kwargs: Any) -> Any:
        if "model_output" in kwargs:
            output = {**kwargs["model_output"], OF_SHADOW: shadow_log_probs}
            if in_ratio:
                output[OF_TRAINING] = own = output["log_probs"]
                values = straight_through(shadow_log_probs.values(), own.values())  # type: ignore[operator]
                offsets = shadow_log_probs.offsets()  # type: ignore[attr-defined]
                output["log_probs"] = torch.nested.nested_tensor_from_jagged(values, offsets)
            kwargs["model_output"] = output
        elif in_ratio:
            raise ConfigurationError(value="shadow", **WORDS["shadow in the ratio"])
        return loss_function(*args, **kwargs)

    return loss


@dataclasses.dataclass(eq=False)
class ShadowModel:
    """The actor's weights in another dtype, sharded alike."""

    engine: Any  # like the actor's engine, with this model: evaluation mode, no gradients
    stale: bool = False  # whether the actor's weights have changed since the last copy

    @property
    def module(self) -> nn.Module:
        """The shadow's model."""
        return self.engine.module  # type: ignore[no-any-return]

    def outdate(self) -> None:
        """Mark the copy as stale after an update of the actor, and drop weights that a forward has gathered."""
        self.stale = True
        reshard(self.module)

    @torch.no_grad()
    def step(self, actor: nn.Module, micro_batch: Any, loss_function: Any = None) -> Any:
        """Run a forward step; if the actor's weights have changed, first round this rank's shards into the copy."""
        if self.stale:
            reshard(actor)
            for mine, theirs in zip(self.module.parameters(), actor.parameters(), strict=True):
                local_part(mine).copy_(local_part(theirs))
            self.stale = False
        return self.engine.verified_step(micro_batch, loss_function, True)


def reshard(module: nn.Module) -> None:
    """Drop the weights that a forward has gathered: FSDP2 hides the root's shards, FSDP1 would compute from them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._is_root is not None:  # the part has run before
            handle = part._handle
            if handle is not None and handle.uses_sharded_strategy:  # one rank alone gathers nothing
                handle.reshard(True)


@contextlib.contextmanager
@torch.no_grad()
def rounded_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round FP32 weights to the nearest numbers of `dtype` inside the block, and restore them bit for bit afterwards.

    For many steps all FP32 weights may move by less than half of a BF16 spacing, and a BF16 rollout sees no change. The
    module may be sharded by FSDP1 or FSDP2; its shards are copied once for the time of the block.
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
