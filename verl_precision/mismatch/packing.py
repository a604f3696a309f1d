"""From padded or jagged batches to chunks of valid tokens: what every statistic of this package streams over.

Shapes: B responses, T response tokens (padded), N valid tokens of a chunk, R responses of a chunk.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl_precision.errors import ConfigurationError

# Tokens (padding included) taken at a time. On a CPU a chunk's float64 temporaries are then a few MiB, about the size
# of the cache; `benchmarks/mismatch.py --chunk-tokens` shows the effect. A GPU wants few, large kernels.
CPU_CHUNK_TOKENS = 1 << 17
GPU_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Chunk:
    """The usable tokens of some whole responses.

    Attributes:
        log_probs: [N] float64 each, in the order given; all finite and <= 0.
        advantages_N: [N] in the dtype given, or None.
        lengths_R: [R] int64, usable tokens of each response.
        whole_R: [R] bool, responses with at least one valid token and without an unusable one.
        nonfinite: number of valid tokens left out because a log-prob is NaN or infinite.
        positive: number of valid tokens left out because a log-prob is above 0 (and all are finite).
    """

    log_probs: tuple[Tensor, ...]
    advantages_N: Tensor | None
    lengths_R: Tensor
    whole_R: Tensor
    nonfinite: int
    positive: int


def packed_chunks(
    log_probs: Mapping[str, Tensor],
    response_mask: Tensor | None,
    advantages: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> list[Callable[[], Chunk]]:
    """Check a batch and cut it into chunks of whole responses, each to be packed when its turn comes.

    Args:
        log_probs: name -> [B, T] floating, in nats; or all of them nested tensors of `torch.jagged` layout.
        response_mask: [B, T], nonzero where a token counts; nested if the log-probs are, and then None means all.
        advantages: as the log-probs, or [B] for one a response, or None.
        chunk_tokens: tokens at a time (at least one response); None: fit for the device.

    Returns:
        One function a chunk, which packs the tokens that count. A chunk may be empty. What masked tokens hold is never
        looked at.

    Raises:
        ConfigurationError: if shapes, layouts or types do not fit.
    """
    first = next(iter(log_probs.values()))
    tensors = {**log_probs, "response_mask": response_mask, "advantages": advantages}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    _check(given, log_probs, first)
    if chunk_tokens is None:
        chunk_tokens = CPU_CHUNK_TOKENS if first.device.type == "cpu" else GPU_CHUNK_TOKENS
    if chunk_tokens < 1:
        raise ConfigurationError(
            setting="chunk_tokens", value=chunk_tokens, allowed="1 or more, or None", remedy="Leave it at None."
        )
    names = tuple(log_probs)
    return [partial(_pack, given, names, rows, tokens) for rows, tokens in _cuts(first, chunk_tokens)]


def _pack(given: dict[str, Tensor], names: tuple[str, ...], rows: slice, tokens: slice | None) -> Chunk:
    """Gather the valid tokens of some rows; `tokens` is where a jagged batch holds them."""
    first, flat = given[names[0]], {}
    per_response = "advantages" in given and not given["advantages"].is_nested and given["advantages"].dim() == 1
    for name, tensor in given.items():
        if name != "advantages" or not per_response:
            flat[name] = tensor[rows].reshape(-1) if tokens is None else tensor.values()[tokens]
    lengths_R = _lengths(first, rows)
    if "response_mask" in flat:
        index_N = _positions(flat.pop("response_mask"))
        flat = {name: tensor.index_select(0, index_N) for name, tensor in flat.items()}
        ends_R = torch.searchsorted(index_N, lengths_R.cumsum(0))
        lengths_R = ends_R.diff(prepend=ends_R.new_zeros(1))
    if per_response:
        flat["advantages"] = given["advantages"][rows].repeat_interleave(lengths_R)
    return _usable([flat[name].double() for name in names], flat.get("advantages"), lengths_R)


def _positions(mask: Tensor) -> Tensor:
    """Return where a mask is not zero, [N] int64; NumPy finds it three times as fast as torch on a CPU."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.bool().numpy()))


def _usable(log_probs: list[Tensor], advantages_N: Tensor | None, lengths_R: Tensor) -> Chunk:
    """Leave out tokens with a log-prob that is not finite or above 0; rare, so looked for by the extremes first."""
    if not log_probs[0].numel():
        return Chunk(tuple(log_probs), advantages_N, lengths_R, lengths_R > 0, 0, 0)
    extremes = torch.stack([bound for values in log_probs for bound in values.aminmax()])
    if bool((extremes.isfinite() & (extremes <= 0)).all()):
        return Chunk(tuple(log_probs), advantages_N, lengths_R, lengths_R > 0, 0, 0)
    stacked = torch.stack(log_probs)
    finite_N = stacked.isfinite().all(dim=0)
    usable_N = finite_N & (stacked <= 0).all(dim=0)
    rows_N = torch.arange(len(lengths_R), device=lengths_R.device).repeat_interleave(lengths_R)
    usable_R = torch.bincount(rows_N[usable_N], minlength=len(lengths_R))
    return Chunk(
        tuple(values[usable_N] for values in log_probs),
        None if advantages_N is None else advantages_N[usable_N],
        usable_R,
        (usable_R == lengths_R) & (lengths_R > 0),
        nonfinite=int((~finite_N).sum()),
        positive=int((finite_N & ~usable_N).sum()),
    )


def _cuts(first: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, slice | None]]:
    """Yield the responses of each chunk, and where a jagged batch holds their tokens."""
    if not first.is_nested:
        rows_at_once = max(1, chunk_tokens // max(1, first.shape[1]))
        for start in range(0, first.shape[0], rows_at_once):
            yield slice(start, start + rows_at_once), None
        return
    offsets = _offsets(first).tolist()
    start = 0
    while start < len(offsets) - 1:
        stop = start + 1
        while stop < len(offsets) - 1 and offsets[stop + 1] - offsets[start] <= chunk_tokens:
            stop += 1
        yield slice(start, stop), slice(offsets[start], offsets[stop])
        start = stop


def _offsets(jagged: Tensor) -> Tensor:
    offsets: Tensor = jagged.offsets()  # type: ignore[attr-defined]
    return offsets


def _lengths(first: Tensor, rows: slice) -> Tensor:
    if first.is_nested:
        return _offsets(first)[rows.start : rows.stop + 1].diff()
    count = len(range(*rows.indices(first.shape[0])))
    return torch.full((count,), first.shape[1], device=first.device)


def _check(given: dict[str, Tensor], log_probs: Mapping[str, Tensor], first: Tensor) -> None:
    reference = next(iter(log_probs))
    for name, tensor in given.items():
        if name != "response_mask" and not tensor.is_floating_point():
            raise ConfigurationError(
                f"{name} is {tensor.dtype}", allowed="a floating-point tensor", remedy="Pass log-probs, not tokens."
            )
    if "response_mask" not in given and not first.is_nested:
        raise ConfigurationError(
            "response_mask is None", allowed="[B, T] beside padded log-probs", remedy="Pass the mask."
        )
    for name, tensor in given.items():
        holes = tensor.is_nested and tensor.layout == torch.jagged and tensor.lengths() is not None  # type: ignore[attr-defined]
        if tensor.is_nested and (tensor.layout != torch.jagged or holes or tensor.dim() != 2):
            raise ConfigurationError(
                f"{name} is a nested tensor of {tensor.dim()} dimensions, layout {tensor.layout}"
                f"{', with holes' if holes else ''}",
                allowed="[B, jagged], layout torch.jagged, contiguous",
                remedy="Call .contiguous(), or pad it.",
            )
        if name == "advantages" and not tensor.is_nested and tensor.shape == (first.shape[0],):
            continue
        fits = tensor.is_nested == first.is_nested and tensor.dim() == 2
        if fits and first.is_nested:
            fits = torch.equal(_offsets(tensor), _offsets(first))
        elif fits:
            fits = tensor.shape == first.shape
        if not fits:
            raise ConfigurationError(
                f"{name} has shape {tuple(tensor.shape)}, {reference} {tuple(first.shape)}",
                allowed="[B, T] of one shape for all, or jagged with the same lengths (advantages also [B])",
                remedy="Pad or nest all of them alike.",
            )
