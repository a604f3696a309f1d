"""verl's platform for a machine without accelerator, `VERL_PLATFORM=cpu`, and its process group there.

The platform is never chosen by auto-detection: on a GPU cluster the driver often sees no device, and verl's own
fall-back must stay what it is. `scale=cpu` sets the variable.
"""

import contextlib
from types import ModuleType

from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_precision.errors import RegistrationError
from verl_precision.integration.cpu import device as cpu_device
from verl_precision.integration.ledger import wrap_once

PLATFORM_NAME = "cpu"


class PlatformCPU(PlatformBase):
    """CPU with gloo collectives; Ray hands out its workers as a purely logical GPU resource."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = cpu_device

    current_device = staticmethod(cpu_device.current_device)
    manual_seed = manual_seed_all = staticmethod(cpu_device.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = cpu_device.do_nothing
    profiler_start = profiler_stop = cudart = cpu_device.do_nothing

    def is_available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False, so that auto-detection never picks this platform; see the module's docstring."""
        return False

    def device_count(self) -> int:
        """Return 1 per process."""
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return (None, None), verl's answer for "not a CUDA device"."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable Ray sets for its GPU resource."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: there is no NVTX."""
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        """Return GPU: verl counts only GPU or NPU, so `scale=cpu` tells Ray of one logical GPU per worker."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return the variable that keeps Ray from hiding devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False: weights go to the rollout through shared memory."""
        return False


def register_platform(platform_manager: ModuleType) -> None:
    """Register the platform with verl; refuse to replace another package's `cpu`."""
    owner = PlatformRegistry.get(PLATFORM_NAME)
    if owner is PlatformCPU:
        return
    if owner is not None:
        raise RegistrationError(
            f"verl platform {PLATFORM_NAME!r} is already registered by {owner.__module__}.{owner.__qualname__}",
            remedy="Uninstall one of the two packages, or disable this one: "
            "VERL_USE_EXTERNAL_PLUGINS=<the other plugin>.",
        )
    PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)


def patch_process_group(distributed: ModuleType) -> None:
    """Give verl's process group one gloo backend on a CPU; elsewhere nothing changes.

    verl asks for `cpu:gloo,<device>:<backend>`. With device cpu that names the CPU twice, and torch refuses it.
    """
    wrap_once(distributed.__name__, "initialize_global_process_group_ray", _with_single_backend)


def _with_single_backend(wrapped, instance, args, kwargs):
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu" and kwargs.get("backend") is None and args[1:] in ((), (None,)):
        args, kwargs = args[:1], {**kwargs, "backend": "cpu:gloo"}
    return wrapped(*args, **kwargs)
