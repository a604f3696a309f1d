"""verl's platform for a machine without accelerator: `VERL_PLATFORM=cpu`.

Never chosen by auto-detection: on a GPU cluster the driver often sees no device, and verl's own fall-back must stay
what it is. `scale=cpu` sets the variable.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_precision.errors import RegistrationError
from verl_precision.integration.cpu import device as cpu_device

PLATFORM_NAME = "cpu"


class PlatformCPU(PlatformBase):
    """CPU with gloo collectives; Ray hands out its workers as a purely logical GPU resource."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Return the stand-in for `torch.cuda`."""
        return cpu_device

    def is_available(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False, so that auto-detection never picks this platform; see the module's docstring."""
        return False

    def current_device(self) -> Any:
        """Return `torch.device("cpu")`; verl only passes it on to torch."""
        return cpu_device.current_device()

    def device_count(self) -> int:
        """Return 1 per process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU operations are synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        cpu_device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        cpu_device.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: there is no device allocator to configure."""

    def empty_cache(self) -> None:
        """Do nothing: there is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return (None, None), verl's answer for "not a CUDA device"."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable Ray sets for its GPU resource."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing: there is no NVTX."""
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        """Return GPU: verl counts only GPU or NPU, so `scale=cpu` tells Ray of one logical GPU per worker."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return the variable that keeps Ray from hiding devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False: weights go to the rollout through shared memory."""
        return False

    def cudart(self) -> None:
        """Return None: there is no CUDA runtime."""
        return None


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
