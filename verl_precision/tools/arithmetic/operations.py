"""Operations that compute inside in another dtype (`inner`) and round once, to the dtype of their input.

`inner` is FP32 or FP64. The gradient of the same formula is computed in FP32 (for FP64 in FP64) and rounded once to the
operand's dtype. A result is infinite or NaN where the native result is, since its range is the same.

Shapes: N tokens, H heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 2**20  # elements of a weight, and of a product, that are in `inner` at a time


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in another dtype; a dtype of 16 bits is reached through FP32.

    Short sums of 16-bit numbers are often ties: they lie halfway between two 16-bit numbers. If a sum misses such a tie
    by 1e-16, FP32 rounds it to the tie again.
    """
    return x.to(torch.promote_types(dtype, torch.float32)).to(dtype)


def backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a gradient is computed in."""
    return torch.promote_types(dtype, torch.float32)


class _RoundedOnce(torch.autograd.Function):
    """A formula of floating-point operands; the backward pass computes it again, as gradient checkpointing does."""

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., Tensor], inner: torch.dtype, *operands: Tensor) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*operands)
        with torch.autocast(operands[0].device.type, enabled=False):
            return rounded(formula(*(operand.to(inner) for operand in operands)), operands[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: gradient checkpointing computes them at this read
        wide = backward_dtype(gradients[0].dtype)
        with torch.enable_grad(), torch.autocast(gradients[0].device.type, enabled=False):
            operands = [x.detach().to(wide).requires_grad_() for x in saved]
            found = torch.autograd.grad(ctx.formula(*operands), operands, gradients[0].to(wide))
        return None, None, *(rounded(gradient, x.dtype) for gradient, x in zip(found, saved, strict=True))


class _Linear(torch.autograd.Function):
    """Computes x Wᵀ + b by blocks of rows of W: a copy of a large output head in `inner` would not fit in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, inner: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        result = x.new_empty(*x.shape[:-1], len(weight))
        with torch.autocast(x.device.type, enabled=False):
            rows = x.to(inner)
            for block in _blocks(x, weight):
                added = None if bias is None else bias[block].to(inner)
                result[..., block] = rounded(F.linear(rows, weight[block].to(inner), added), x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide = backward_dtype(x.dtype)
        above, rows = gradients[0].reshape(-1, len(weight)), x.reshape(-1, x.shape[-1]).to(wide)
        to_x, to_weight = torch.zeros_like(rows), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(x.device.type, enabled=False):
            for block in _blocks(x, weight):
                part = above[:, block].to(wide)
                to_x.addmm_(part, weight[block].to(wide))
                if to_weight is not None:
                    to_weight[block] = rounded(part.T @ rows, weight.dtype)
        to_bias = rounded(above.to(wide).sum(0), x.dtype) if ctx.needs_input_grad[2] else None
        return rounded(to_x, x.dtype).view_as(x), to_weight, to_bias, None


def _blocks(x: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _BLOCK // max(x[..., 0].numel(), x.shape[-1]))
    return [slice(start, start + size) for start in range(0, len(weight), size)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, inner: torch.dtype) -> Tensor:
    """Return x Wᵀ + b."""
    return _Linear.apply(x, weight, bias, inner)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, inner: torch.dtype) -> Tensor:
    """Return w·x / √(mean(x²) + ε), over the last dimension."""

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

    return _RoundedOnce.apply(formula, inner, x, weight)


def silu_and_mul(gate: Tensor, up: Tensor, *, inner: torch.dtype) -> Tensor:
    """Return silu(gate)·up."""
    return _RoundedOnce.apply(lambda gate, up: F.silu(gate) * up, inner, gate, up)


def rotary_frequencies(theta: float, head_size: int) -> Tensor:
    """Return the angle by which one position rotates each pair of dimensions, FP64 [D / 2]."""
    return float(theta) ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)


def rotary(x_NHD: Tensor, positions_N: Tensor, frequencies: Tensor, *, inner: torch.dtype) -> Tensor:
    """Return each head rotated by its token's position; dimension i is paired with dimension i + D / 2."""
    angles = positions_N[:, None, None].double() * frequencies.to(x_NHD.device)
    cos, sin = angles.cos(), angles.sin()

    def formula(x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        c, s = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((one * c - other * s, other * c + one * s), dim=-1)

    return _RoundedOnce.apply(formula, inner, x_NHD)
