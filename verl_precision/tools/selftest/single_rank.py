"""verl's engine outside of a training run: a process group of one rank, and whole sequences as a batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu


def make_group_of_one(device: str) -> None:
    """Make the default process group with only this process."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def engine_batch(sequences: list[Tensor], **settings: object) -> Any:
    """Return token ids, [T] each, as a micro-batch for verl's engine; every token counts, the temperature is 1.

    `settings` are the other entries of the batch that the engine needs, such as `use_remove_padding`.
    """
    tensors = {
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(len(sequence)) for sequence in sequences]),
        "loss_mask": nested([torch.ones(len(sequence)) for sequence in sequences]),
        "temperature": torch.ones(len(sequences)),
    }
    return tu.get_tensordict(tensors, {"use_dynamic_bsz": True, "use_fused_kernels": False, **settings})


def nested(tensors: list[Tensor]) -> Tensor:
    """Return tensors of different lengths as one nested tensor, the form that verl's engine takes."""
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
