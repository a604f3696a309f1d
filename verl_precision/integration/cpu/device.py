"""What verl asks of `torch.cuda`, answered for a CPU: `torch.cpu` plus memory and random-state functions.

Memory figures are those of this process (`psutil`), so verl's `perf/max_memory_*` metrics mean something on a CPU.
"""

import psutil
import torch
from torch.cpu import (  # noqa: F401 - re-exported: verl reaches them through the platform's device_module
    Event,
    Stream,
    StreamContext,
    current_stream,
    device_count,
    is_available,
    is_initialized,
    set_device,
    stream,
    synchronize,
)


def current_device() -> torch.device:
    """Return the device; verl passes the answer to `Tensor.to` and to FSDP."""
    return torch.device("cpu")


def get_device_name(device: object = None) -> str:
    """Return the name shown in verl's FLOPs table; unknown to it, so MFU is not computed."""
    return "CPU"


def manual_seed(seed: int) -> None:
    """Seed torch's CPU generator."""
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: object = None) -> torch.Tensor:
    """Return the CPU generator's state; verl stores it in its checkpoints."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    """Restore the CPU generator's state."""
    torch.set_rng_state(state)


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (available, total) bytes of the machine's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: object = None) -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss


memory_reserved = memory_allocated


def max_memory_allocated(device: object = None) -> int:
    """Return the peak resident bytes of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: object = None) -> None:
    """Do nothing: the kernel's peak cannot be reset."""


def empty_cache() -> None:
    """Do nothing: there is no caching device allocator."""


def ipc_collect() -> None:
    """Do nothing: weights travel through shared memory."""


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Do nothing: the CPU allocator has no such limit."""
