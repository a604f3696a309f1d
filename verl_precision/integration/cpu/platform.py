"""verl's platform for a machine without accelerator, `VERL_PLATFORM=cpu`, and its process group there.

Auto-detection never chooses this platform: on a GPU cluster the driver often sees no device, and must keep verl's
own default. `scale=cpu` sets the variable.
"""

import contextlib
import resource
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_precision.integration.ledger import already_registered, wrapping

PLATFORM_NAME = "cpu"


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _free_and_total_bytes(device: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


# The functions of `torch.cuda` that verl calls, here from `torch.cpu`, torch's random state and this process's memory.
cpu_device: Any = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__ if name != "current_device"},
    current_device=_always(torch.device("cpu")),  # verl passes the answer to `Tensor.to` and to FSDP
    get_device_name=_always("CPU"),  # not in verl's FLOPs table, so verl computes no MFU
    get_rng_state=torch.get_rng_state,  # verl stores the state in its checkpoints
    set_rng_state=torch.set_rng_state,
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    mem_get_info=_free_and_total_bytes,
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: psutil.Process().memory_info().rss),
    **dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved"),
        lambda device=None: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    ),
    **dict.fromkeys(("empty_cache", "ipc_collect"), _always(None)),
    **dict.fromkeys(("reset_peak_memory_stats", "set_per_process_memory_fraction"), _always(None)),
)


class PlatformCPU(PlatformBase):
    """A CPU with gloo collectives; for Ray each worker has one logical GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = cpu_device

    is_available = _always(True)
    is_platform_available = _always(False)  # auto-detection calls it; see the module's docstring
    current_device = _always(cpu_device.current_device())
    device_count = _always(1)  # per process
    get_device_capability = _always((None, None))  # verl's answer for "not a CUDA device"
    communication_backend_name = _always("gloo")
    is_ipc_supported = _always(False)  # weights go to the rollout through shared memory
    ray_resource_name = _always("GPU")  # verl counts only GPU or NPU: `scale=cpu` gives Ray a logical GPU per worker
    ray_noset_envvars = _always(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])  # keeps Ray from hiding devices
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")  # what Ray sets for its GPU resource
    manual_seed = manual_seed_all = staticmethod(cpu_device.manual_seed)
    # A CPU is one synchronous device, without caching allocator, profiler, NVTX or CUDA runtime.
    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)
    nvtx_range = _always(contextlib.nullcontext())


def register_platform(platform_manager: ModuleType) -> None:
    """Register the platform with verl; refuse to replace another package's `cpu`."""
    owner = PlatformRegistry.get(PLATFORM_NAME)
    if owner is PlatformCPU:
        return
    if owner is not None:
        raise already_registered(f"verl platform {PLATFORM_NAME!r}", owner)
    PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)


@wrapping("initialize_global_process_group_ray")
def patch_process_group(wrapped, instance, args, kwargs):
    """Give verl's process group one gloo backend on a CPU, which verl's default names twice; GPUs keep the default."""
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu" and kwargs.get("backend") is None and args[1:] in ((), (None,)):
        args, kwargs = args[:1], {**kwargs, "backend": "cpu:gloo"}
    return wrapped(*args, **kwargs)
