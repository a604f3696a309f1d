"""16-bit matrix products on a CPU without 16-bit kernels: computed in FP32, rounded once.

A tensor core multiplies 16-bit numbers exactly, adds in FP32 and rounds the sum once. Torch's own FP16 product on a CPU
without FP16 instructions takes ten times as long as an FP32 one. `+cpu_products=rounded_once` computes every linear
layer, of the trainer and of vLLM, as an FP32 product of the 16-bit numbers, and rounds the result to their dtype. So a
run also depends less on which kernels a CPU has. Attention and the experts of a mixture keep their kernels.
"""

import os
from types import ModuleType
from typing import Any

import torch

from verl_precision.base.dtypes import HALF, torch_dtype
from verl_precision.integration.ledger import wrapping

VARIABLE = "VERL_PRECISION_CPU_PRODUCTS"  # set by the preset, in every process of Ray
ROUNDED_ONCE = "rounded_once"
SIXTEEN_BITS = tuple(map(torch_dtype, HALF))

_native_linear = torch.nn.functional.linear


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b, in FP32 and rounded once to the dtype of x; so are both products of its gradient.

    If x is neither FP16 nor BF16, or not on the CPU, torch's own product is returned.
    """
    if input.dtype not in SIXTEEN_BITS or input.device.type != "cpu":
        return _native_linear(input, weight, bias)
    product = _native_linear(input.float(), weight.float(), None if bias is None else bias.float())
    return product.to(input.dtype)


def round_once_in_the_trainer(module: ModuleType) -> None:
    """Replace torch's linear in a process that trains, if the run asks for it."""
    if os.environ.get(VARIABLE) == ROUNDED_ONCE:
        torch.nn.functional.linear = linear


@wrapping("dispatch_cpu_unquantized_gemm")
def round_once_in_the_rollout(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Choose the kernel of a linear layer in vLLM."""
    layer = args[0] if args else kwargs["layer"]
    asked = os.environ.get(VARIABLE) == ROUNDED_ONCE
    if asked and layer.weight.ndim == 2 and layer.weight.dtype in SIXTEEN_BITS and not layer.weight.is_meta:
        layer.cpu_linear = linear  # reads the weight itself, which therefore stays as it was loaded
    else:
        wrapped(*args, **kwargs)
