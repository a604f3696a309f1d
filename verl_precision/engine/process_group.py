"""A process group of one rank, for what runs an engine outside of a training run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Make a process group of one rank inside the block.

    Args:
        device: "cuda" (NCCL, and gloo for tensors on the host) or "cpu" (gloo).
    """
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
