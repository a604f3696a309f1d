"""The instruction sets of this CPU; vLLM and oneDNN choose their kernels by them."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
)


def instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU that decide which kernels run."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in INSTRUCTION_SETS if name in flags]
