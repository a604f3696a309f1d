"""The functions of `torch.cuda` that verl calls, for a CPU: `torch.cpu`, random state, memory of this process."""

import resource

import psutil
import torch
from torch import get_rng_state, manual_seed, set_rng_state  # noqa: F401 - verl stores the state in its checkpoints
from torch.cpu import (  # noqa: F401 - verl reaches them through the platform's device_module
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

manual_seed_all = manual_seed


def current_device() -> torch.device:
    """Return the device; verl passes the answer to `Tensor.to` and to FSDP."""
    return torch.device("cpu")


def get_device_name(device: object = None) -> str:
    """Return the name shown in verl's FLOPs table; unknown to it, so MFU is not computed."""
    return "CPU"


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (available, total) bytes of the machine's memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: object = None) -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: object = None) -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: a CPU has no caching allocator, no memory limit, no profiler and no second device."""


empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = do_nothing
