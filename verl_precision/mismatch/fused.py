"""The fast way to measure a batch: numba's single pass over the arrays, on a CPU; `kernel_for` decides when.

torch reads and writes each of its temporaries, and packs the valid tokens first. The kernel (`fused_kernel.py`) reads
the batch in place, and writes no temporaries. Both give the same sums up to float64 rounding, and the same histogram.
"""

import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_precision.base.loggers import mismatch as logger
from verl_precision.base.mergeable import Count, Statistic
from verl_precision.mismatch.packing import FlatBatch, slices
from verl_precision.mismatch.token_sums import TokenSums, counts_of_bits, totals_of_signed

# Tokens, padding included. With fewer, torch takes at most 10 ms, less than the import and compilation of the kernel.
SMALLEST_BATCH = 1 << 18
# Tokens of a piece that one thread takes at a time: 5 ms of work, so that distributing the pieces costs little.
PIECE_TOKENS = 1 << 19


class Measured(NamedTuple):
    """The result of one pass over a batch; tensors of responses are on the CPU, those of whole responses in float64."""

    counts: Mapping[str, Statistic]  # metrics of how many tokens there are, and how many were left out
    sums: TokenSums | None  # over the tokens; None if there are none
    whole_B: Tensor  # bool, which of all responses are whole: at least one valid token, none left out
    log_ratio_B: Tensor  # log ρ of the whole responses
    length_B: Tensor  # their tokens
    final_gap_B: Tensor  # the gap of their last token


def kernel_for(tokens: Tensor) -> ModuleType | None:
    """Return the kernel's module if the kernel measures a batch of these tokens; None if torch does."""
    return _kernel() if tokens.device.type == "cpu" and tokens.numel() >= SMALLEST_BATCH else None


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from verl_precision.mismatch import fused_kernel
    # numba is not installed, or not made for this NumPy; or there is no writable folder for compiled code
    except (ImportError, RuntimeError) as error:
        logger.warning("large batches are measured with torch, which is several times slower: %s", error)
        return None
    return fused_kernel


def measure(batch: FlatBatch) -> Measured:
    """Measure a batch with the kernel, on as many threads as torch has; pieces are merged in their own order."""
    pieces = list(slices(batch, PIECE_TOKENS))
    run = functools.partial(_measure_piece, batch)
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(pieces))) as pool:
        return _merged(pool.map(run, pieces))


def _measure_piece(batch: FlatBatch, piece: tuple[slice, Tensor]) -> tuple[np.ndarray, ...]:
    """Pass some responses to the kernel, as views if their dtypes fit; return the kernel's results."""
    kernel, (tokens, lengths_R) = _kernel(), piece
    assert kernel is not None
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in batch.log_probs) else torch.float32
    mask, signs = batch.mask[tokens], batch.advantages[tokens]
    mask = mask if mask.dtype == torch.int64 else mask.bool().view(torch.uint8)
    signs = signs if signs.dtype == dtype else signs.sign().to(dtype)
    log_probs = (each[tokens].to(dtype) for each in batch.log_probs)
    arrays = [part.contiguous().numpy() for part in (*log_probs, mask, signs)]
    lengths_R = lengths_R.long()
    return kernel.measure_responses(*arrays, (lengths_R.cumsum(0) - lengths_R).numpy(), lengths_R.numpy())


def _merged(results: Iterator[tuple[np.ndarray, ...]]) -> Measured:
    """Return the merged results of the kernel for the pieces, in the order of the pieces."""
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
