"""What vLLM runs on this CPU is what vLLM says; each answer can be forced."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_instruction_sets(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse avx2 amx_tile\nbugs\t\t:\n")
    monkeypatch.setattr(kernels, "CPUINFO", tmp_path / "cpuinfo")
    assert kernels.instruction_sets() == ["avx2", "amx_tile"]
