"""Causal attention that computes inside in another dtype and rounds once, over spans of queries and keys.

A packed sequence is a span of rows; so is a request of a server, whose queries are new and whose keys lie in the pages
of a cache. Nothing is computed between sequences.

Shapes: N queries, M keys, H query heads, K key heads, D head size; Q queries and S keys of a span.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_precision.tools.arithmetic.operations import backward_dtype, rounded

_QUERIES = 128  # of one span that are computed at a time: scores stay small


class AttentionSpan(NamedTuple):
    """A sequence, or the end of one: its queries lie together, its keys anywhere."""

    query: int  # row of the first query
    queries: int  # how many
    keys: Tensor  # rows of all keys up to the last query's


def packed(positions_BT: Tensor, mask_BT: Tensor | None) -> list[AttentionSpan]:
    """Return the spans of a batch whose rows hold one sequence each, padded, or several, whose positions restart.

    Rows of queries and keys are those of the flattened batch. Where the mask is False nothing is computed.
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
    return [AttentionSpan(start, count, rows[start : start + count]) for start, count in spans]


def _pieces(spans: list[AttentionSpan]) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of queries, and those of the keys up to the last of them."""
    for query, queries, keys in spans:
        for start in range(0, queries, _QUERIES):
            end = min(start + _QUERIES, queries)
            yield slice(query + start, query + end), keys[: len(keys) - queries + end]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, spans: list[AttentionSpan], inner: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.spans = scale, spans
        result = torch.zeros_like(q)
        with torch.autocast(q.device.type, enabled=False):
            for queries, keys in _pieces(spans):
                operands = (q[queries].to(inner), k[keys].to(inner), v[keys].to(inner))
                result[queries] = rounded(_attend(*operands, scale), q.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v = ctx.saved_tensors
        wide = backward_dtype(q.dtype)
        to_q, to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for queries, keys in _pieces(ctx.spans):
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                operands = [x.detach().to(wide).requires_grad_() for x in (q[queries], k[keys], v[keys])]
                result = _attend(operands[0], operands[1], operands[2], ctx.scale)
                found = torch.autograd.grad(result, operands, gradients[0][queries].to(wide))
            to_q[queries] = found[0]
            to_k.index_add_(0, keys, found[1])
            to_v.index_add_(0, keys, found[2])
        return rounded(to_q, q.dtype), rounded(to_k, k.dtype), rounded(to_v, v.dtype), None, None, None


def attention(
    q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, scale: float, spans: list[AttentionSpan], *, inner: torch.dtype
) -> Tensor:
    """Return softmax(scale · q kᵀ) v, each query over the keys of its span up to its own position; 0 outside of spans.

    Query heads come in groups of H / K, each with a key head.
    """
    return _Attention.apply(q_NHD, k_MKD, v_MKD, scale, spans, inner)


def _attend(q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float) -> Tensor:
    """Return the attention of the last Q of S tokens."""
    queries, tokens, groups = len(q_QHD), len(k_SKD), k_SKD.shape[1]
    q = q_QHD.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [K, H/K, Q, D]
    scores = q @ k_SKD.permute(1, 2, 0).unsqueeze(1) * scale
    hidden_QS = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).triu(tokens - queries + 1)
    p = scores.masked_fill(hidden_QS, float("-inf")).softmax(-1)
    return (p @ v_SKD.transpose(0, 1).unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2)
