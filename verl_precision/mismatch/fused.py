"""The fast way to measure a batch: numba's single pass over the arrays, on a CPU; `kernel_for` says when.

torch reads and writes each of its temporaries, and packs the valid tokens first. The kernel (`fused_kernel.py`) reads
the batch where it lies, and writes nothing. Both give the same sums up to float64 rounding, and the same histogram.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_precision.base.mergeable import Count, Statistic
from verl_precision.mismatch.packing import checked, row_slices
from verl_precision.mismatch.token_sums import TokenSums, counts_of_bits, totals_of_signed

# Tokens, padding included. Below, torch takes 10 ms at most, and importing and compiling the kernel is not worth it.
SMALLEST_BATCH = 1 << 18
# Tokens of a piece that one thread takes at a time: 5 ms of work, beside which handing out is little.
PIECE_TOKENS = 1 << 19

logger = logging.getLogger("verl_precision.mismatch")


class Measured(NamedTuple):
    """The result of one pass over a batch; tensors of responses are on the CPU, numbers of whole ones in float64."""

    counts: Mapping[str, Statistic]  # metrics of how many tokens there are, and how many were left out
    sums: TokenSums | None  # over the tokens; None if there are none
    whole_B: Tensor  # bool, which of all responses are whole: at least one valid token, none left out
    log_ratio_B: Tensor  # log ρ of the whole responses
    length_B: Tensor  # their tokens
    final_gap_B: Tensor  # the gap of their last token


def kernel_for(log_probs: Tensor) -> ModuleType | None:
    """Return the kernel's module, if it measures a batch with these log-probs; None: torch does."""
    tokens = log_probs.values().numel() if log_probs.is_nested else log_probs.numel()
    return _kernel() if log_probs.device.type == "cpu" and tokens >= SMALLEST_BATCH else None


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from verl_precision.mismatch import fused_kernel
    # numba is not installed, or not made for this NumPy; or no folder can be written for what it compiles
    except (ImportError, RuntimeError) as error:
        logger.warning("large batches are measured with torch, which takes several times as long: %s", error)
        return None
    return fused_kernel


def measure(
    log_probs: Mapping[str, Tensor], response_mask: Tensor | None, advantages: Tensor | None, chunk_tokens: int | None
) -> Measured:
    """Measure a batch, given as `packed_chunks` takes it, with the kernel, on as many threads as torch has.

    Pieces are merged in their own order, so that threads do not change the result.
    """
    given = {name: tensor.detach() for name, tensor in checked(log_probs, response_mask, advantages).items()}
    pieces = list(row_slices(given["response_mask"], PIECE_TOKENS if chunk_tokens is None else chunk_tokens))
    threads = min(torch.get_num_threads(), len(pieces))
    run = functools.partial(_measure_piece, given)
    if threads == 1:
        return _merged(map(run, pieces))
    with ThreadPoolExecutor(threads) as pool:
        return _merged(pool.map(run, pieces))


def _measure_piece(given: Mapping[str, Tensor], piece: tuple[slice, slice, Tensor]) -> tuple[np.ndarray, ...]:
    """Hand some responses to the kernel, as flat views; a piece is copied only where it has no such view."""
    kernel = _kernel()
    assert kernel is not None
    *log_probs, mask, advantages = given.values()
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in log_probs) else torch.float32
    flat = [_flat(each, piece, lambda part: part.to(dtype)) for each in log_probs]
    flat.append(_flat(mask, piece, lambda m: m if m.dtype == torch.int64 else m.bool().view(torch.uint8)))
    flat.append(_flat(advantages, piece, lambda part: part if part.dtype == dtype else part.sign().to(dtype)))
    arrays, begins = zip(*flat, strict=True)
    return kernel.measure_responses(*arrays, np.stack(begins), piece[-1].long().numpy())


def _flat(
    tensor: Tensor, piece: tuple[slice, slice, Tensor], convert: Callable[[Tensor], Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a flat array that holds some responses, and where each begins in it."""
    rows, tokens, lengths_R = piece
    if tensor.is_nested:
        return convert(tensor.values()[tokens]).contiguous().numpy(), (lengths_R.cumsum(0) - lengths_R).numpy()
    part = convert(tensor[rows])
    if part.stride(1) != 1:
        part = part.contiguous()
    span = (part.shape[0] - 1) * part.stride(0) + part.shape[1] if part.numel() else 0
    return part.as_strided((span,), (1,)).numpy(), np.arange(part.shape[0]) * part.stride(0)


def _merged(results: Iterator[tuple[np.ndarray, ...]]) -> Measured:
    """Merge what the kernel returned for the pieces, in their order."""
    *sums, lows, highs, per_response = next(results)
    of_responses = [per_response]
    for *more, low, high, per_response in results:
        for total, part in zip(sums, more, strict=True):
            total += part
        lows, highs = np.minimum(lows, low), np.maximum(highs, high)
        of_responses.append(per_response)
    added, tokens, gaps, bits, left_out = map(torch.from_numpy, sums)
    log_ratio_B, length_B, final_gap_B = torch.from_numpy(np.concatenate(of_responses, axis=1))
    whole_B = length_B > 0
    counts = {"tokens": added[0], "nonfinite_tokens": left_out[0], "positive_log_probs": left_out[1]}
    token_sums = None
    if added[0]:
        values = *added, *map(torch.tensor, (*lows, *highs)), *totals_of_signed(tokens, gaps), counts_of_bits(bits)
        token_sums = TokenSums(*values)
    of_whole = (part[whole_B] for part in (log_ratio_B, length_B, final_gap_B))
    return Measured({name: Count(number) for name, number in counts.items()}, token_sums, whole_B, *of_whole)
