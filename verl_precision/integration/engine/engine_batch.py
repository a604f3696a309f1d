"""Whole sequences as a batch for verl's engine, for what runs an engine outside of a training run."""

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu


def engine_batch(sequences: list[Tensor], **settings: object) -> Any:
    """Return sequences as verl's engine takes a micro-batch, every token counted, temperature 1.

    Args:
        sequences: Token ids, int64 [T] each.
        settings: What the engine asks of a batch beside its tensors, such as `use_remove_padding`.
    """
    return tu.get_tensordict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(sequence)) for sequence in sequences]),
            "loss_mask": nested([torch.ones(len(sequence)) for sequence in sequences]),
            "temperature": torch.ones(len(sequences)),
        },
        non_tensor_dict={"use_dynamic_bsz": True, "use_fused_kernels": False, **settings},
    )


def nested(tensors: list[Tensor]) -> Tensor:
    """Return tensors of different lengths as verl's engine takes them."""
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
