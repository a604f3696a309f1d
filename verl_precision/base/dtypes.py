"""The dtypes of training and rollout: one table of their names and of their precision."""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Dtype = Literal["fp16", "bf16", "fp32"]
Arithmetic = Literal["native", "rounded_once", "exact"]
EXACT = "exact"  # with this arithmetic, trainer and rollout round the same numbers


class Names(NamedTuple):
    """The names of one dtype in other software."""

    torch: str
    safetensors: str
    others: tuple[str, ...]  # further spellings that verl accepts
    bits: int  # bits of the significand, with the implicit bit


DTYPES = {
    "bf16": Names("bfloat16", "BF16", ("bf16-mixed",), 8),
    "fp16": Names("float16", "F16", ("half", "16", "16-mixed"), 11),
    "fp32": Names("float32", "F32", ("float", "32", "32-true"), 24),
}
HALF = ("bf16", "fp16")
_SHORT = {
    spelling: name
    for name, known in DTYPES.items()
    for spelling in (name, known.torch, f"torch.{known.torch}", *known.others)
}


def short(value: object) -> str:
    """Return bf16, fp16 or fp32 for any spelling of these dtypes, and any other value in lower case."""
    text = str(value).lower()
    return _SHORT.get(text, text)


def long(value: object) -> str:
    """Return torch's name of a dtype for any of its spellings; verl and vLLM accept this name too."""
    return DTYPES[short(value)].torch


def torch_dtype(value: object) -> "torch.dtype":
    """Return torch's dtype for any spelling of a dtype."""
    import torch

    return getattr(torch, long(value))
