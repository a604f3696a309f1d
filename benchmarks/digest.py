"""Time of the weight-sync guard's digest, beside hashlib's SHA-256 of the same bytes.

    python benchmarks/digest.py
    python benchmarks/digest.py --device cuda --megabytes 4096 --shape 768 2048

One large tensor, and a stream of small tensors, as a mixture of experts sends them. Both are compared with torch's copy
of the same bytes into allocated memory. A time ends when the device has finished and the digests are fetched.
"""

import argparse
import hashlib
import itertools
import statistics
from collections.abc import Iterator

import torch
from measure import Record, alternate, growth, parser, record, report

from verl_precision.weight_sync.manifest import StreamDigest

DISTINCT = 32  # small tensors in memory; the stream repeats them


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, repeats=7)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="torch device (default cpu)")
    arguments.add_argument("--dtype", default="bfloat16", help="dtype of the tensors (default bfloat16)")
    arguments.add_argument("--megabytes", type=int, default=512, help="MiB of the large tensor (default 512)")
    arguments.add_argument("--tensors", type=int, default=19_000, help="small tensors in the stream (default 19000)")
    arguments.add_argument("--shape", type=int, nargs="+", default=[64, 64], help="of a small tensor (default 64 64)")
    return arguments.parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    dtype = getattr(torch, arguments.dtype)
    elements = arguments.megabytes * 2**20 // dtype.itemsize
    yield measure((elements,), 1, dtype, arguments)
    yield measure(tuple(arguments.shape), arguments.tensors, dtype, arguments)


def measure(shape: tuple[int, ...], count: int, dtype: torch.dtype, arguments: argparse.Namespace) -> Record:
    """Return the comparison for a stream of `count` tensors of a shape."""
    block = torch.randn(1 << 20).to(arguments.device, dtype)
    size = torch.Size(shape).numel()
    tensors = [block.repeat(-(-size // block.numel()))[:size].view(shape) for _ in range(min(count, DISTINCT))]
    target = torch.empty_like(tensors[0])

    def stream(half: bool = False) -> Iterator[torch.Tensor]:
        if count == 1:
            return iter([tensors[0][: size // 2] if half else tensors[0]])
        return itertools.islice(itertools.cycle(tensors), count // 2 if half else count)

    def copy() -> None:
        for tensor in stream():
            target.copy_(tensor)

    def sha256() -> None:
        for tensor in stream():
            hashlib.sha256(tensor.cpu().view(torch.uint8).numpy()).digest()

    def digest(half: bool = False) -> None:
        digests = StreamDigest()
        for number, tensor in enumerate(stream(half)):
            digests.add(str(number), tensor)
        digests.fetch()

    calls = {"ours": digest, "theirs": sha256, "copy": copy, "half": lambda: digest(half=True)}
    times = alternate(calls, arguments.repeats)
    copied = statistics.median(times["copy"])
    return record(
        f"digest of {count} x {list(shape)} {arguments.dtype}, {arguments.device}",
        "hashlib's SHA-256",
        "ms",
        times["ours"],
        times["theirs"],
        limit=f"one read: half of torch's copy, which takes {copied:.3g} ms",
        least=copied / 2,
        growth=growth(times, "ours", {"bytes" if count == 1 else "tensors": "half"}),
    )


if __name__ == "__main__":
    report(records(given := parse()), given.json)
