"""Time and memory of all mismatch statistics beside verl's, in one process.

    python benchmarks/mismatch.py
    python benchmarks/mismatch.py --rows 4096 --tokens 8192 --repeats 3

verl's: `compute_offpolicy_metrics` and `calculate_debug_metrics`, one after the other. Ours:
`MismatchStatistics.measure` with advantages, and `.metrics()`. float32, lengths uniform in [1, T], mask int64
as verl has it.

Memory: the rise of the process's peak resident memory over its resident memory before the call. Each side has its own
process. A call on a small batch has loaded, compiled and started everything before. Needs Linux (/proc).
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measure import MIB, Record, alternate, bandwidth, growth, parser, record, report

from verl_precision.mismatch import fused
from verl_precision.mismatch.statistics import MismatchStatistics

PEER = "verl's compute_offpolicy_metrics and calculate_debug_metrics"


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, repeats=9)
    arguments.add_argument("--rows", type=int, default=1024, help="responses (default 1024)")
    arguments.add_argument("--tokens", type=int, default=4096, help="tokens of the longest response (default 4096)")
    arguments.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    arguments.add_argument("--torch", action="store_true", help="measure ours without the compiled kernel")
    arguments.add_argument("--memory-of", choices=("ours", "verl's"), help="print the bytes of one call and stop")
    return arguments.parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    set_up(arguments)
    yield time_of_both(arguments)
    # One value for each side; memory that the allocator holds already changes the last MiBs, hence `noise`.
    ours, theirs = ([memory_in_own_process(side) / MIB] for side in ("ours", "verl's"))
    yield record(f"memory of {name(arguments)}", PEER, "MiB", ours, theirs, at_most=0.1, noise=0.05)


def set_up(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    fused.SMALLEST_BATCH = math.inf if arguments.torch else 0  # 0: the small first batch compiles the kernel


def name(arguments: argparse.Namespace) -> str:
    way = "" if fused.kernel_for(torch.zeros(1)) else ", without the kernel"
    return f"statistics of the mismatch, {arguments.rows} x {arguments.tokens} float32{way}"


def time_of_both(arguments: argparse.Namespace) -> Record:
    rows, tokens = arguments.rows, arguments.tokens
    ours, theirs = prepare(arguments, rows, tokens)
    half_tokens, _ = prepare(arguments, rows, tokens // 2)
    half_rows, _ = prepare(arguments, rows // 2, tokens)
    calls = {"ours": ours, "theirs": theirs, "half the tokens": half_tokens, "half the responses": half_rows}
    times = alternate(calls, arguments.repeats)
    # the mask of every token, and three floats of each valid token: half of the tokens are valid
    least = rows * tokens * (8 + 3 * 4 / 2) / bandwidth()
    grown = growth(times, "ours", {"tokens": "half the tokens", "responses": "half the responses"})
    fields = {"at_most": 0.05, "limit": "one read of the valid tokens", "least": least, "growth": grown}
    return record(name(arguments), PEER, "ms", times["ours"], times["theirs"], **fields)


def prepare(arguments: argparse.Namespace, rows: int, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return this package's call and verl's, on one batch."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    generator = torch.Generator().manual_seed(0)
    shape = (rows, tokens)
    rollout = torch.empty(shape).exponential_(0.5, generator=generator).neg_()
    trainer = torch.randn(shape, generator=generator).mul_(1e-2).add_(rollout).clamp_(max=0)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    advantages = torch.randn(rows, 1, generator=generator).expand(shape).contiguous()
    tensors = {"rollout_log_probs": rollout, "old_log_probs": trainer, "response_mask": mask, "responses": mask}
    batch = DataProto.from_dict(tensors=tensors)

    def ours() -> dict[str, float]:
        measured = MismatchStatistics.measure(trainer, rollout, mask, advantages)
        return measured.metrics()

    def theirs() -> None:
        compute_offpolicy_metrics(trainer, rollout, mask)
        calculate_debug_metrics(batch)

    return ours, theirs


def memory_in_own_process(side: str) -> int:
    """Return what `--memory-of` prints."""
    command = [sys.executable, *sys.argv, "--memory-of", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def peak_memory(arguments: argparse.Namespace) -> int:
    """Return the bytes that one call adds to the process's peak resident memory."""
    set_up(arguments)
    side = ("ours", "verl's").index(arguments.memory_of)
    prepare(arguments, 32, arguments.tokens)[side]()
    call = prepare(arguments, arguments.rows, arguments.tokens)[side]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) << 10


if __name__ == "__main__":
    if (given := parse()).memory_of:
        print(peak_memory(given))
    else:
        report(records(given), given.json)
