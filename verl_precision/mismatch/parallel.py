"""Chunks over threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from verl_precision.mismatch.packing import Chunk
from verl_precision.mismatch.sums import State

# Each thread holds one chunk. Beyond a few, Python's own lock is what they would wait for.
MOST_THREADS = 4


def measured(
    measure: Callable[[Sequence[Callable[[], Chunk]]], State],
    chunks: Sequence[Callable[[], Chunk]],
    device: torch.device,
) -> list[State]:
    """Return what `measure` finds in each thread's share of the chunks.

    torch's own threads split every operation and meet again after it, hundreds of times a chunk; where other processes
    want the cores, each meeting costs a time slice. Threads that own whole chunks meet once. The shares depend only on
    the number of torch's threads, so that a result repeats exactly.

    Args:
        measure: pure; runs without gradients.
        chunks: from `packed_chunks`.
        device: of the batch; only a CPU has more than one thread.
    """

    def without_gradients(share: Sequence[Callable[[], Chunk]]) -> State:
        with torch.no_grad():  # a setting of the thread
            return measure(share)

    threads = min(torch.get_num_threads(), MOST_THREADS, len(chunks)) if device.type == "cpu" else 1
    if threads <= 1:
        return [without_gradients(chunks)]
    with ThreadPoolExecutor(threads, thread_name_prefix="mismatch") as pool:
        return list(pool.map(without_gradients, [chunks[i::threads] for i in range(threads)]))
