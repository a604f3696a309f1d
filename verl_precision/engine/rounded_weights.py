"""A forward with the weights as a coarser engine has them: what it computes, without what its weights have missed."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from verl_precision.engine.loss_scaling import local_part
from verl_precision.engine.shadow import reshard

ROUNDED_TO = "verl_precision_rounded_to"  # in a batch: the dtype that the weights are rounded to for its forward


@contextlib.contextmanager
@torch.no_grad()
def rounded_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, FP32 weights hold the nearest numbers of `dtype`; afterwards they are what they were, to the bit.

    FP32 weights move by less than half of a BF16 spacing for many steps, all of them at once. A BF16 rollout sees none
    of it, and the two policies part by more than rounding anywhere in a forward would make them.

    Args:
        module: Sharded by FSDP1 or FSDP2, or not at all. Its shards are copied once while this lasts.
        dtype: The dtype in which the other engine holds its weights.
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
