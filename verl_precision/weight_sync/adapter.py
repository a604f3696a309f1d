"""Does the rollout compute with the LoRA adapter that it was sent? Its buffers are compared with it. Pure torch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verl_precision.weight_sync.manifest import StreamDigest


def not_held(sent: Mapping[str, Tensor], held: Iterable[Tensor], dtype: torch.dtype, scaling: float) -> list[str]:
    """Return, sorted, the names of an adapter's tensors that are in none of the rollout's buffers, bit for bit.

    Args:
        sent: A [rank, in] and B [out, rank] of each adapted layer, under PEFT's names.
        held: What the rollout's layers compute with, in any order.
        dtype: The rollout's dtype of adapters.
        scaling: What the rollout has multiplied B by, once it had rounded it to its dtype.
    """
    expected, found = StreamDigest(), StreamDigest()
    for name, tensor in sent.items():
        expected.add(name, tensor.to(dtype) * scaling if "lora_B" in name else tensor.to(dtype))
    for place, tensor in enumerate(held):
        found.add(str(place), tensor)
    there = {str(one) for one in found.fetch().values()}
    return sorted(name for name, one in expected.fetch().items() if str(one) not in there)
