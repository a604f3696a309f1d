"""Time and memory of all mismatch statistics beside verl's, in one process.

    python benchmarks/mismatch.py
    python benchmarks/mismatch.py --rows 4096 --tokens 8192 --repeats 3

verl's: `compute_offpolicy_metrics` and `calculate_debug_metrics`, one after the other. Ours:
`MismatchStatistics.measure` with advantages, and `.metrics()`. float32, lengths uniform in [1, T], mask int64
as verl has it.

Time: the calls alternate, so that a busy machine slows both; the median over the repeats, and the median of the ratios
of the pairs. The limit is the time in which torch sums each of the four arrays, so reads each once. Memory: the rise of
the process's peak resident memory over what it held before the call, in a process of its own for each side, after a
call on a small batch has loaded, compiled and started everything. Needs Linux (/proc).
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from verl_precision.mismatch import fused
from verl_precision.mismatch.statistics import MismatchStatistics

MIB = 1 << 20


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    fused.SMALLEST_BATCH = math.inf if arguments.torch else 0  # 0: the small batch that comes first compiles the kernel
    if arguments.memory_of:
        print(peak_memory(arguments))
        return
    ours, theirs, read = prepare(arguments, arguments.rows)
    ours(), theirs(), read()
    times = [(clock(ours), clock(theirs), clock(read)) for _ in range(arguments.repeats)]
    reason = fused.reason_for_torch(torch.zeros(1))
    way = "the kernel" if reason is None else f"torch ({reason})"
    our_ms, their_ms, read_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    faster = [b / a for a, b, _ in times]
    del ours, theirs, read
    our_mib, their_mib = (memory_in_own_process(side) / MIB for side in ("ours", "verl's"))
    print(f"{arguments.rows} x {arguments.tokens} float32, {arguments.repeats} repeats, {arguments.threads} threads")
    print(f"ours is measured by {way}")
    print(
        f"time, ms     ours {our_ms:8.1f}   verl's {their_ms:8.1f}   {statistics.median(faster):.1f} times faster",
        end="",
    )
    print(f" ({min(faster):.1f} to {max(faster):.1f})")
    print(f"limit, ms    read {read_ms:8.1f}   {read_ms / our_ms:.0%} of it reached")
    print(f"memory, MiB  ours {our_mib:8.1f}   verl's {their_mib:8.1f}   {their_mib / our_mib:.1f} times less")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="responses (default 1024)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the longest response (default 4096)")
    parser.add_argument("--repeats", type=int, default=9, help="timed pairs (default 9)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--chunk-tokens", type=int, help="tokens at a time (default: as in training)")
    parser.add_argument("--torch", action="store_true", help="measure ours without the kernel")
    parser.add_argument("--memory-of", choices=("ours", "verl's"), help="print the bytes of one call and stop")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, rows: int) -> tuple[Callable[[], object], ...]:
    """Return our call, verl's, and one that only reads, on one batch."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    generator = torch.Generator().manual_seed(0)
    shape = (rows, arguments.tokens)
    rollout = torch.empty(shape).exponential_(0.5, generator=generator).neg_()
    trainer = torch.randn(shape, generator=generator).mul_(1e-2).add_(rollout).clamp_(max=0)
    lengths = torch.randint(1, arguments.tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(arguments.tokens) < lengths).long()
    advantages = torch.randn(rows, 1, generator=generator).expand(shape).contiguous()
    tensors = {"rollout_log_probs": rollout, "old_log_probs": trainer, "response_mask": mask, "responses": mask}
    batch = DataProto.from_dict(tensors=tensors)

    def ours() -> dict[str, float]:
        measured = MismatchStatistics.measure(trainer, rollout, mask, advantages, chunk_tokens=arguments.chunk_tokens)
        return measured.metrics()

    def theirs() -> None:
        compute_offpolicy_metrics(trainer, rollout, mask)
        calculate_debug_metrics(batch)

    def read() -> None:
        for array in (trainer, rollout, mask, advantages):
            array.sum()

    return ours, theirs, read


def clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_in_own_process(side: str) -> int:
    """Return what `--memory-of` prints."""
    command = [sys.executable, *sys.argv, "--memory-of", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def peak_memory(arguments: argparse.Namespace) -> int:
    """Return how many bytes one call adds to the process's resident memory at its peak."""
    side = ("ours", "verl's").index(arguments.memory_of)
    prepare(arguments, rows=32)[side]()
    call = prepare(arguments, arguments.rows)[side]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) << 10


if __name__ == "__main__":
    main()
