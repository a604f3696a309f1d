"""A process group of one rank, for what runs an engine outside of a training run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def make_group_of_one(device: str) -> None:
    """Make the default process group, of this process alone.

    Args:
        device: "cuda" (NCCL, and gloo for tensors on the host) or "cpu" (gloo).
    """
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Have a process group of this process alone inside the block; see `make_group_of_one`."""
    make_group_of_one(device)
    try:
        yield
    finally:
        dist.destroy_process_group()
