"""From padded or jagged batches to chunks of valid tokens, from which every statistic of this package is computed.

Shapes: B responses, T response tokens (padded), N valid tokens of a chunk, R responses of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.mergeable import Count, Statistic

# Tokens (padding included) of one chunk. On a CPU a chunk's float64 temporaries are then a few MiB, about the size
# of the cache. A GPU is faster with few, large kernels.
CPU_CHUNK_TOKENS = 1 << 17
GPU_CHUNK_TOKENS = 1 << 22


class FlatBatch(NamedTuple):
    """A batch as flat tensors of all its tokens, padding included, one response after the other."""

    log_probs: tuple[Tensor, ...]
    mask: Tensor
    advantages: Tensor
    offsets: Tensor  # [B + 1], where each response begins
    ended_B: Tensor | None = None  # bool, the responses that came to an end by themselves; None: all of them

    def only(self, responses_B: Tensor) -> "FlatBatch":
        """Return the batch with the tokens of some responses (bool) alone."""
        if responses_B.all():
            return self
        inside = responses_B.to(self.mask.device).repeat_interleave(self.offsets.diff())
        return self._replace(mask=self.mask.bool() & inside)


@dataclass(frozen=True)
class Chunk:
    """The usable tokens of some whole responses."""

    log_probs: tuple[Tensor, ...]  # [N] float64 each, in the order given; all finite and <= 0
    advantages_N: Tensor  # in the dtype given
    lengths_R: Tensor  # int64, usable tokens of each
    whole_R: Tensor  # bool, responses with at least one valid token and no unusable token
    counts: dict[str, Statistic]  # metrics of how many tokens there are, and how many were left out

    def __len__(self) -> int:
        """Return N."""
        return len(self.log_probs[0])

    @property
    def last_R(self) -> Tensor:
        """[R] int64, the place of each response's last token among the N tokens; meaningless without tokens."""
        return self.lengths_R.cumsum(0) - 1


def packed_chunks(batch: FlatBatch) -> Iterator[Chunk]:
    """Yield the valid tokens of a batch in chunks of whole responses: at least one chunk, which may be empty."""
    size = CPU_CHUNK_TOKENS if batch.mask.device.type == "cpu" else GPU_CHUNK_TOKENS
    for tokens, lengths_R in slices(batch, size):
        index_N = batch.mask[tokens].nonzero().squeeze(1)
        ends_R = torch.searchsorted(index_N, lengths_R.cumsum(0))
        of_tokens = [each[tokens].index_select(0, index_N).double() for each in batch.log_probs]
        advantages_N = batch.advantages[tokens].index_select(0, index_N)
        yield _usable(of_tokens, advantages_N, ends_R.diff(prepend=ends_R.new_zeros(1)))


def flattened(
    *log_probs: Tensor, mask: Tensor | None, advantages: Tensor | None = None, ended: Tensor | None = None
) -> FlatBatch:
    """Return a batch as flat tensors; require one shape and layout of all tensors.

    The log-probs of the trainer, of a shadow if there is one, and of the rollout are [B, T] floating, in nats, or all
    nested (`torch.jagged`). The mask is [B, T], nonzero where a token counts, or nested, or None (all nested tokens).
    Advantages are like the log-probs, or [B], or None (no sign). `ended` is [B] bool, or None.
    """
    first, names = log_probs[0], ("trainer", "rollout") if len(log_probs) == 2 else ("trainer", "shadow", "rollout")
    if mask is None and not first.is_nested:
        raise ConfigurationError("response_mask is None", allowed="[B, T] beside padded log-probs")
    given = {f"{name}_log_probs": tensor.detach() for name, tensor in zip(names, log_probs, strict=True)}
    given |= {} if mask is None else {"response_mask": mask}
    given |= {} if advantages is None else {"advantages": advantages.detach()}
    for name, tensor in given.items():
        per_response = name == "advantages" and not tensor.is_nested and tensor.shape == first.shape[:1]
        floating = tensor.is_floating_point() or name == "response_mask"
        if not floating or not (per_response or _same_shape(tensor, first)):
            shapes = ["nested" if each.is_nested else tuple(each.shape) for each in (tensor, first)]
            raise ConfigurationError(
                f"{name} is {tensor.dtype}, {shapes[0]}, {tensor.layout}, "
                f"trainer_log_probs {first.dtype}, {shapes[1]}, {first.layout}",
                allowed="floating-point [B, T] of one shape for all, or nested with the same lengths, layout "
                "torch.jagged, contiguous (advantages also [B])",
                remedy="Pad or nest all of them alike; .contiguous() closes holes.",
            )
    if first.is_nested:
        offsets = first.offsets()  # type: ignore[attr-defined]
    else:
        offsets = torch.arange(first.shape[0] + 1, device=first.device) * first.shape[1]
    flat = {name: (each.values() if each.is_nested else each).reshape(-1) for name, each in given.items()}
    mask, signs, every = flat.pop("response_mask", None), flat.pop("advantages", None), flat["trainer_log_probs"]
    mask = torch.ones_like(every, dtype=torch.bool) if mask is None else mask
    signs = torch.zeros_like(every) if signs is None else signs
    signs = signs if len(signs) == len(every) else signs.repeat_interleave(offsets.diff())
    return FlatBatch(tuple(flat.values()), mask, signs, offsets, ended)


def slices(batch: FlatBatch, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of whole responses, at least one: the place of each in all tokens, and its responses' lengths."""
    bounds, lengths, start = batch.offsets.tolist(), batch.offsets.diff(), 0
    while True:
        stop = min(start + 1, len(lengths))
        while stop < len(lengths) and bounds[stop + 1] - bounds[start] <= chunk_tokens:
            stop += 1
        yield slice(bounds[start], bounds[stop]), lengths[start:stop]
        start = stop
        if start == len(lengths):
            return


def _usable(log_probs: list[Tensor], advantages_N: Tensor, lengths_R: Tensor) -> Chunk:
    """Return the chunk without tokens whose log-prob is not finite or above 0; the extremes show if there are any."""
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
    return not has_holes and torch.equal(one.offsets(), other.offsets())  # type: ignore[attr-defined]
