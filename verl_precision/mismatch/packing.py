"""From padded or jagged batches to chunks of valid tokens: what every statistic of this package streams over.

Shapes: B responses, T response tokens (padded), N valid tokens of a chunk, R responses of a chunk.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.mergeable import Count, Statistic

# Tokens (padding included) taken at a time. On a CPU a chunk's float64 temporaries are then a few MiB, about the size
# of the cache; `benchmarks/mismatch.py --chunk-tokens` shows the effect. A GPU wants few, large kernels.
CPU_CHUNK_TOKENS = 1 << 17
GPU_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Chunk:
    """The usable tokens of some whole responses."""

    log_probs: tuple[Tensor, ...]  # [N] float64 each, in the order given; all finite and <= 0
    advantages_N: Tensor  # in the dtype given
    lengths_R: Tensor  # int64, usable tokens of each
    whole_R: Tensor  # bool, responses with at least one valid token and without an unusable one
    counts: dict[str, Statistic]  # metrics of how many tokens there are, and how many were left out

    def __len__(self) -> int:
        """Return N."""
        return len(self.log_probs[0])

    @property
    def last_R(self) -> Tensor:
        """[R] int64, where among the N tokens the last of each response is; meaningless for a response without any."""
        return self.lengths_R.cumsum(0) - 1


def packed_chunks(
    log_probs: Mapping[str, Tensor],
    response_mask: Tensor | None,
    advantages: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Iterator[Chunk]:
    """Check a batch, and yield its valid tokens in chunks of whole responses: at least one, which may be empty.

    Tensors are as in `checked`. `chunk_tokens` at a time, at least one response; None fits the device.
    """
    given = checked(log_probs, response_mask, advantages)
    for rows, tokens, lengths_R in row_slices(given["response_mask"], chunk_tokens):
        flat = {name: x.values()[tokens] if x.is_nested else x[rows].reshape(-1) for name, x in given.items()}
        index_N = _positions(flat.pop("response_mask"))
        ends_R = torch.searchsorted(index_N, lengths_R.cumsum(0))
        *of_tokens, advantages_N = (values.index_select(0, index_N) for values in flat.values())
        yield _usable([values.double() for values in of_tokens], advantages_N, ends_R.diff(prepend=ends_R.new_zeros(1)))


def checked(
    log_probs: Mapping[str, Tensor], response_mask: Tensor | None, advantages: Tensor | None
) -> dict[str, Tensor]:
    """Return a batch's log-probs, its `response_mask` and its `advantages`, all of one shape and layout.

    Log-probs are [B, T] floating, in nats, or all of them nested (`torch.jagged`); the mask [B, T], nonzero where a
    token counts, or nested, or None for all nested ones; advantages as the log-probs, or [B], or None: they have no
    sign.
    """
    name_of_first, first = next(iter(log_probs.items()))
    if response_mask is None and not first.is_nested:
        raise ConfigurationError("response_mask is None", allowed="[B, T] beside padded log-probs")
    for name, tensor in {**log_probs, "response_mask": response_mask, "advantages": advantages}.items():
        if tensor is None:
            continue
        per_response = name == "advantages" and not tensor.is_nested and tensor.shape == first.shape[:1]
        floating = tensor.is_floating_point() or name == "response_mask"
        if not floating or not (per_response or _same_shape(tensor, first)):
            shapes = ["nested" if each.is_nested else tuple(each.shape) for each in (tensor, first)]
            raise ConfigurationError(
                f"{name} is {tensor.dtype}, {shapes[0]}, {tensor.layout}, "
                f"{name_of_first} {first.dtype}, {shapes[1]}, {first.layout}",
                allowed="floating-point [B, T] of one shape for all, or nested with the same lengths, layout "
                "torch.jagged, contiguous (advantages also [B])",
                remedy="Pad or nest all of them alike; .contiguous() closes holes.",
            )
    if response_mask is None:
        response_mask = like(first, torch.ones_like(first.values(), dtype=torch.bool))
    advantages = torch.zeros(first.shape[0], device=first.device) if advantages is None else advantages
    advantages = advantages if advantages.dim() == 2 else of_tokens(advantages, first)
    return {**log_probs, "response_mask": response_mask, "advantages": advantages}


def with_rows(mask: Tensor, rows_B: Tensor) -> Tensor:
    """Return a mask, padded or nested, without the responses that are not in `rows_B` (bool)."""
    if rows_B.all():
        return mask
    values = mask.values() if mask.is_nested else mask
    rows = of_tokens(rows_B.to(mask.device), mask)
    return like(mask, values.bool() & (rows.values() if mask.is_nested else rows))


def of_tokens(values_B: Tensor, batch: Tensor) -> Tensor:
    """Return a value of each response as that of each of its tokens, in a batch's layout."""
    if not batch.is_nested:
        return values_B.unsqueeze(1).expand(batch.shape)
    return like(batch, values_B.repeat_interleave(_offsets(batch).diff()))


def like(batch: Tensor, values: Tensor) -> Tensor:
    """Return values of a batch's tokens in its layout: as they are, or nested as it is."""
    return torch.nested.nested_tensor_from_jagged(values, offsets=_offsets(batch)) if batch.is_nested else values


def row_slices(batch: Tensor, chunk_tokens: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut a batch into at least one piece of whole responses: its rows, its place in all tokens, the lengths."""
    if chunk_tokens is None:
        chunk_tokens = CPU_CHUNK_TOKENS if batch.device.type == "cpu" else GPU_CHUNK_TOKENS
    if chunk_tokens < 1:
        raise ConfigurationError(setting="chunk_tokens", value=chunk_tokens, allowed="1 or more, or None")
    offsets = _offsets(batch)
    bounds, lengths, responses, start = offsets.tolist(), offsets.diff(), batch.shape[0], 0
    while True:
        stop = min(start + 1, responses)
        while stop < responses and bounds[stop + 1] - bounds[start] <= chunk_tokens:
            stop += 1
        yield slice(start, stop), slice(bounds[start], bounds[stop]), lengths[start:stop]
        start = stop
        if start == responses:
            return


def _offsets(batch: Tensor) -> Tensor:
    """Return where each response begins among all tokens, padding included, [B + 1]."""
    if batch.is_nested:
        return batch.offsets()  # type: ignore[attr-defined]
    return torch.arange(batch.shape[0] + 1, device=batch.device) * batch.shape[1]


def _positions(mask: Tensor) -> Tensor:
    """Return where a mask is not zero, [N] int64; NumPy finds it three times as fast as torch on a CPU."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.bool().numpy()))


def _usable(log_probs: list[Tensor], advantages_N: Tensor, lengths_R: Tensor) -> Chunk:
    """Leave out tokens with a log-prob that is not finite or above 0; rare, so looked for by the extremes first."""
    whole_R = lengths_R > 0
    nonfinite = positive = lengths_R.new_zeros(())
    extremes = [bound for values in log_probs if len(values) for bound in values.aminmax()]
    bounds = torch.stack(extremes) if extremes else lengths_R.new_zeros(1)
    if not bool((bounds.isfinite() & (bounds <= 0)).all()):
        stacked = torch.stack(log_probs)
        finite_N = stacked.isfinite().all(dim=0)
        usable_N = finite_N & (stacked <= 0).all(dim=0)
        rows_N = torch.arange(len(lengths_R), device=lengths_R.device).repeat_interleave(lengths_R)
        usable_R = torch.bincount(rows_N[usable_N], minlength=len(lengths_R))
        whole_R, lengths_R = whole_R & (usable_R == lengths_R), usable_R
        nonfinite, positive = (~finite_N).sum(), (finite_N & ~usable_N).sum()
        log_probs = [values[usable_N] for values in log_probs]
        advantages_N = advantages_N[usable_N]
    counts = {"tokens": lengths_R.sum(), "nonfinite_tokens": nonfinite, "positive_log_probs": positive}
    totals: dict[str, Statistic] = {name: Count(number) for name, number in counts.items()}
    return Chunk(tuple(log_probs), advantages_N, lengths_R, whole_R, totals)


def _same_shape(one: Tensor, other: Tensor) -> bool:
    if one.dim() != 2 or one.is_nested != other.is_nested or one.layout != other.layout:
        return False
    if not one.is_nested:
        return one.shape == other.shape
    has_holes = one.layout != torch.jagged or one.lengths() is not None  # type: ignore[attr-defined]
    return not has_holes and torch.equal(_offsets(one), _offsets(other))
