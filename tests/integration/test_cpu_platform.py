"""The CPU platform answers what verl asks, and is never chosen unasked."""

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_manager import _detect_platform_name

from verl_precision.errors import ConfigurationError
from verl_precision.integration.cpu import device as cpu_device
from verl_precision.integration.cpu.platform import PlatformCPU


def test_platform_is_complete():
    platform = PlatformCPU()  # an abstract method left out would raise here
    assert (platform.device_name, platform.vendor_name) == ("cpu", "cpu")
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_options(1) == {"num_gpus": 1}
    assert platform.current_device() == torch.device("cpu")
    assert platform.is_available() and not platform.is_ipc_supported()
    with platform.nvtx_range("x"):
        pass


def test_never_auto_detected(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert _detect_platform_name() != "cpu"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert _detect_platform_name() == "cpu"


def test_device_module_answers_every_name_verl_uses():
    used = "empty_cache synchronize is_available current_stream set_device mem_get_info stream Stream set_rng_state"
    used += " get_rng_state set_per_process_memory_fraction ipc_collect device_count memory_reserved memory_allocated"
    used += " max_memory_reserved max_memory_allocated get_device_name Event manual_seed manual_seed_all"
    for name in used.split():
        assert callable(getattr(cpu_device, name)), name


def test_random_state_round_trip():
    state = cpu_device.get_rng_state()
    first = torch.rand(3)
    cpu_device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_memory_figures_are_this_process():
    assert 0 < cpu_device.memory_allocated() <= cpu_device.max_memory_allocated() + (64 << 20)
    available, total = cpu_device.mem_get_info()
    assert 0 < available <= total


def test_fsdp1_on_cpu_is_refused_by_name(monkeypatch):
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401 - registers the engines
    from verl.workers.engine.base import EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "cpu")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHeadOnCPU"
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__ == "FSDPEngineWithValueHeadOnCPU"
    with pytest.raises(ConfigurationError, match="strategy=.fsdp.*fsdp2"):
        EngineRegistry.get_engine_cls("language_model", "fsdp")()
