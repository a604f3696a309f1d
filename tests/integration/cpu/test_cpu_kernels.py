"""What vLLM runs on this CPU is what vLLM says; each answer can be forced."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_precision.base.dtypes import DTYPES, torch_dtype
from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.integration.cpu import kernels


@pytest.fixture
def cpu(monkeypatch):
    """Make torch, which vLLM asks, report other instruction sets."""

    def report(**supported: bool) -> None:
        for name, value in supported.items():
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda value=value: value)

    return report


def test_library_is_the_one_vllm_loads():
    import vllm._custom_ops  # noqa: F401 - loads it

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/vllm/_C" in line}
    assert {Path(path).resolve() for path in mapped} == {kernels.kernel_library().resolve()}


@pytest.mark.parametrize(
    ("avx512", "bf16", "name"), [(True, True, "_C."), (True, False, "_C_AVX512."), (False, False, "_C_AVX2.")]
)
def test_every_library_is_in_the_wheel(cpu, avx512, bf16, name):
    cpu(avx2=True, avx512=avx512, avx512_bf16=bf16)
    assert kernels.kernel_library().name.startswith(name)


def test_a_cpu_without_avx2_and_a_vllm_without_the_library_are_refused(cpu, monkeypatch, tmp_path):
    cpu(avx2=False)
    with pytest.raises(EnvironmentMismatchError, match="no AVX2.*SIGILL.*Allowed: an x86-64 with AVX2"):
        kernels.kernel_library()
    cpu(avx2=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[tmp_path]))
    with pytest.raises(EnvironmentMismatchError, match="vLLM has no kernels _C.*Install it again"):
        kernels.kernel_library()


@pytest.mark.parametrize("dtype", map(torch_dtype, DTYPES), ids=DTYPES)
def test_head_sizes_are_those_of_vllm(dtype):
    """vLLM's own list has to be a part of what its kernels say; 16 is what died in the quickstart."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = kernels.attention_head_sizes(dtype)
    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(sizes)
    assert 16 not in sizes and not kernels.has_attention_kernel(100, dtype)


WITH_HEAD_DIM = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(("config", "size"), [
    ({"model_type": "qwen3", **WITH_HEAD_DIM}, 32),
    ({"model_type": "qwen2", **WITH_HEAD_DIM}, 16),  # does not read head_dim
    ({"model_type": "llama", **WITH_HEAD_DIM, "head_dim": None}, 16),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "head_dim": 16}, None),
    ({}, None),
])  # fmt: skip
def test_head_size_as_vllm_takes_it(config, size):
    assert kernels.head_size(config) == size


def test_instruction_sets(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse avx2 amx_tile\nbugs\t\t:\n")
    monkeypatch.setattr(kernels, "CPUINFO", tmp_path / "cpuinfo")
    assert kernels.instruction_sets() == ["avx2", "amx_tile"]
