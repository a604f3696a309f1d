"""Operations that compute inside in another dtype (`inner`) and round once, to the dtype of their input.

`inner` is FP32 or FP64. The gradient of the same formula is computed in FP32 (for FP64 in FP64) and rounded once to the
operand's dtype. A result is infinite or NaN where the native result is, since its range is the same.

Attention is causal, over spans of queries and keys. A span is a packed sequence, or a request to a server: its queries
are new, and its keys lie in the pages of a cache. Spans with the same number of queries are computed together.

Shapes: N queries or tokens, M keys, H (query) heads, K key heads, D head size; B spans together, Q queries and S keys
of each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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


_QUERIES = 128  # of one span, computed at a time: keeps the scores small
_KEYS = 2**10  # gathered at a time: their copies in `inner` fit into a CPU cache


class SpansTogether(NamedTuple):
    """Spans with the same number of queries."""

    queries_BQ: Tensor  # rows
    keys_BS: Tensor  # rows; a shorter span repeats its first row, which is masked
    first_B: Tensor  # position of the first query


class AttentionSpan(NamedTuple):
    """A sequence, or the end of one: its query rows are consecutive, its key rows need not be."""

    query: int  # row of the first query
    queries: int  # number of queries
    keys: Tensor  # rows of all keys up to the last query's


def plan(spans: Iterable[AttentionSpan]) -> list[SpansTogether]:
    """Return the parts that are computed at a time: pieces of long spans, or several short spans."""
    pieces: dict[int, list[AttentionSpan]] = defaultdict(list)
    for query, queries, keys in spans:
        for start in range(0, queries, _QUERIES):
            count = min(_QUERIES, queries - start)
            pieces[count].append(AttentionSpan(query + start, count, keys[: len(keys) - queries + start + count]))
    planned = []
    for alike in pieces.values():
        alike.sort(key=lambda piece: len(piece.keys))
        while alike:
            together = max(1, _KEYS // len(alike[-1].keys))
            planned.append(_together(alike[-together:]))
            del alike[-together:]
    return planned


def _together(pieces: list[AttentionSpan]) -> SpansTogether:
    longest, count, device = len(pieces[-1].keys), pieces[-1].queries, pieces[-1].keys.device
    starts = torch.tensor([piece.query for piece in pieces], device=device)
    keys = torch.stack([torch.cat((p.keys, p.keys[:1].expand(longest - len(p.keys)))) for p in pieces])
    first = torch.tensor([len(piece.keys) - count for piece in pieces], device=device)
    return SpansTogether(starts[:, None] + torch.arange(count, device=device), keys, first)


def packed(positions_BT: Tensor, mask_BT: Tensor | None) -> list[SpansTogether]:
    """Return the spans of a batch. A row has one padded sequence, or several, each of which restarts the positions.

    Rows of queries and keys are rows of the flattened batch. Where the mask is False, nothing is computed.
    """
    begins = torch.ones_like(positions_BT, dtype=torch.bool)
    begins[:, 1:] = positions_BT.diff(dim=1) != 1
    if mask_BT is not None:
        begins[:, 1:] |= mask_BT[:, 1:] != mask_BT[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    counts = torch.diff(starts, append=starts.new_tensor([begins.numel()]))
    if mask_BT is not None:
        real = mask_BT.flatten()[starts]
        starts, counts = starts[real], counts[real]
    rows = torch.arange(begins.numel(), device=starts.device)
    spans = zip(starts.tolist(), counts.tolist(), strict=True)
    return plan(AttentionSpan(start, count, rows[start : start + count]) for start, count in spans)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, spans: list[SpansTogether], inner: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.spans = scale, spans
        result = torch.zeros_like(q)
        with torch.autocast(q.device.type, enabled=False):
            for queries, keys, first in spans:
                operands = (q[queries].to(inner), k[keys].to(inner), v[keys].to(inner))
                result[queries] = rounded(_attend(*operands, first, scale), q.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v = ctx.saved_tensors
        wide = backward_dtype(q.dtype)
        to_q, to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for queries, keys, first in ctx.spans:
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                operands = [x.detach().to(wide).requires_grad_() for x in (q[queries], k[keys], v[keys])]
                result = _attend(operands[0], operands[1], operands[2], first, ctx.scale)
                found = torch.autograd.grad(result, operands, gradients[0][queries].to(wide))
            to_q[queries] = found[0]
            to_k.index_add_(0, keys.flatten(), found[1].flatten(0, 1))
            to_v.index_add_(0, keys.flatten(), found[2].flatten(0, 1))
        return rounded(to_q, q.dtype), rounded(to_k, k.dtype), rounded(to_v, v.dtype), None, None, None


def attention(
    q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, scale: float, spans: list[SpansTogether], *, inner: torch.dtype
) -> Tensor:
    """Return softmax(scale · q kᵀ) v, each query over the keys of its span up to its own position; 0 outside of spans.

    Each group of H / K query heads shares one key head.
    """
    return _Attention.apply(q_NHD, k_MKD, v_MKD, scale, spans, inner)


def _attend(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, first_B: Tensor, scale: float) -> Tensor:
    queries, heads, groups = q_BQHD.shape[1], q_BQHD.shape[2], k_BSKD.shape[2]
    q = q_BQHD.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, H/K·Q, D]
    scores = (q @ k_BSKD.permute(0, 2, 3, 1) * scale).unflatten(2, (heads // groups, queries))
    positions = first_B[:, None] + torch.arange(queries, device=first_B.device)
    hidden_BQS = torch.arange(k_BSKD.shape[1], device=first_B.device) > positions.unsqueeze(-1)
    p = scores.masked_fill(hidden_BQS[:, None, None], float("-inf")).softmax(-1).flatten(2, 3)
    return (p @ v_BSKD.transpose(1, 2)).unflatten(2, (heads // groups, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
