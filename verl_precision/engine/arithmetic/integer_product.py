"""A matrix product as sums of integers: a sum that has no order, of numbers that were cut before.

Each row of both operands is cut to a common exponent: xₙₖ ≈ uₙ·qₙₖ, where uₙ is a power of two and qₙₖ an integer of
s bytes. s is the size of the operand's dtype: 2 in 16 bits, 4 in FP32. Then

    Σₖ xₙₖ·wₒₖ ≈ uₙ·uₒ·Σᵢⱼ 256ⁱ⁺ʲ Σₖ dᵢₙₖ·dⱼₒₖ,    q = Σᵢ 256ⁱ·dᵢ,  -128 ≤ dᵢ < 128,

and each inner sum is one INT8 product with INT32 sums, which are exact in any order. So the result depends on its own
two rows alone: no tile, batch, or permutation of k shows in it, by construction. The cut is relative to the row's
largest entry: in 16 bits any other has an error of up to 2⁻¹⁴ of that, and is lost below 2⁻¹⁶ of it.

Shapes: N rows of one operand, O rows of the other, K entries of a row, s slices.
"""

from functools import cache, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_DEPTH = 2**16  # entries of a row that are summed in INT32: of twice as many, all -128·-128, the sum overflows


class Cut(NamedTuple):
    """Rows of integers, and their units."""

    slices_sNK: Tensor  # INT8, the lowest first
    unit_N1: Tensor  # FP64; not a number where a row is not finite


def cut(x_NK: Tensor) -> Cut:
    """Return rows cut to a common exponent, half to even; a row of zeros has the unit of 1, and zeros."""
    count = x_NK.element_size()
    largest = x_NK.abs().amax(-1, keepdim=True).double()
    above = largest.where(largest != 0, 1.0) * (129 / 128)  # so that the largest integer is below 127·256ˢ⁻¹
    unit = above / torch.frexp(above).mantissa * 2.0 ** (1 - 8 * count)
    q = (x_NK / unit).round_().to(torch.int32 if count == 2 else torch.int64)
    signs = sum(128 << 8 * place for place in range(count))
    bytes_NKs = q.add_(signs).bitwise_xor_(signs).contiguous().view(torch.int8)  # of q + signs, each lowered by 128
    return Cut(bytes_NKs.unflatten(-1, (-1, q.itemsize))[..., :count].permute(2, 0, 1).contiguous(), unit)


def product(x: Cut, weight: Cut, bias_O: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b in FP64, [N, O]; not a number where one of both rows is not finite."""
    count, rows, columns = len(x.slices_sNK), len(x.unit_N1), len(weight.unit_N1)
    parts = zip(*(each.slices_sNK.flatten(0, 1).split(_DEPTH, dim=1) for each in (x, weight)), strict=True)
    sums = reduce(lambda one, other: one.double() + other, (_int8_product(*part) for part in parts))
    sums_sNsO = sums.unflatten(1, (count, columns)).unflatten(0, (count, rows))
    result = torch.zeros_like(sums_sNsO[0, :, 0], dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            result.add_(sums_sNsO[i, :, j], alpha=256 ** (i + j))
    result *= x.unit_N1
    result *= weight.unit_N1.T
    return result if bias_O is None else result + bias_O


def _int8_product(a_NK: Tensor, b_OK: Tensor) -> Tensor:
    """Return a bᵀ, exactly, padded to the sizes that CUDA takes; where INT8 kernels saturate, by way of FP64."""
    if not _sums_are_exact(a_NK.device.type):
        return a_NK.double() @ b_OK.double().T
    rows, (columns, depth) = len(a_NK), b_OK.shape
    a = F.pad(a_NK, (0, -depth % 8, 0, max(0, 17 - rows)))
    b = F.pad(b_OK, (0, -depth % 8, 0, -columns % 8))
    return torch._int_mm(a, b.T)[:rows, :columns]


@cache
def _sums_are_exact(device: str) -> bool:
    """Return whether INT8 products are exact: a CPU without VNNI saturates sums of two of them at 16 bits."""
    x = torch.tensor([[127], [-128]], dtype=torch.int8, device=device).repeat(16, 64)
    return torch.equal(torch._int_mm(x, x.T).double(), x.double() @ x.double().T)
