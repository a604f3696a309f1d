"""Time of the digest that the weight-sync guard takes of what is sent, beside torch's copy of the same bytes.

    python benchmarks/digest.py
    python benchmarks/digest.py --device cuda --megabytes 4096 --shape 768 2048
    python benchmarks/digest.py --json

One large tensor, and a stream of small ones, as a mixture of experts sends them. Copies go into memory that is there.
A time ends when the device has finished and the digests have been fetched: median over the repeats, which alternate
with those of the copy, so that a busy machine slows both. GB/s counts the tensor's bytes once.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from verl_precision.weight_sync.manifest import StreamDigest

DISTINCT = 32  # small tensors in memory; the stream goes round


def main() -> None:
    arguments = parse()
    dtype = getattr(torch, arguments.dtype)
    cases = {
        "one large tensor": ((arguments.megabytes * 2**20 // dtype.itemsize,), 1),
        "a stream of small tensors": (tuple(arguments.shape), arguments.tensors),
    }
    results = [
        {"case": name, "shape": list(shape), "tensors": count, **measure(shape, count, dtype, arguments)}
        for name, (shape, count) in cases.items()
    ]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} threads"
    if arguments.json:
        print(json.dumps({"device": device, "torch": torch.__version__, "dtype": arguments.dtype, "results": results}))
        return
    print(f"{arguments.dtype}, {arguments.repeats} repeats, {device}, torch {torch.__version__}")
    print(f"| what | copy, GB/s | digest, GB/s | ratio of times | copy, us each | digest, us each |\n|{'---|' * 6}")
    for one in results:
        what = f"{one['case']}: {one['tensors']} x {one['shape']}"
        speeds = f"{one['copy_gb_per_second']:.2f} | {one['digest_gb_per_second']:.2f} | {one['ratio']:.2f}"
        print(f"| {what} | {speeds} | {one['copy_us_a_tensor']:.1f} | {one['digest_us_a_tensor']:.1f} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="torch device (default cpu)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the tensors (default bfloat16)")
    parser.add_argument("--megabytes", type=int, default=512, help="MiB of the large tensor (default 512)")
    parser.add_argument("--tensors", type=int, default=19_000, help="small tensors in the stream (default 19000)")
    parser.add_argument("--shape", type=int, nargs="+", default=[64, 64], help="of a small tensor (default 64 64)")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def measure(shape: tuple[int, ...], count: int, dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, float]:
    """Return speeds and times of digest and copy, and the ratio of their times."""
    block = torch.randn(1 << 20).to(arguments.device, dtype)
    size = torch.Size(shape).numel()
    tensors = [block.repeat(-(-size // block.numel()))[:size].view(shape) for _ in range(min(count, DISTINCT))]
    target = torch.empty_like(tensors[0])

    def stream() -> itertools.islice:
        return itertools.islice(itertools.cycle(tensors), count)

    def copy() -> None:
        for tensor in stream():
            target.copy_(tensor)

    def digest() -> None:
        digests = StreamDigest()
        for number, tensor in enumerate(stream()):
            digests.add(str(number), tensor)
        digests.fetch()

    copy(), digest()
    times = [(clock(copy, target), clock(digest, target)) for _ in range(arguments.repeats)]
    copied, digested = (statistics.median(column) for column in zip(*times, strict=True))
    size_in_gb = count * target.nbytes / 1e9
    return {
        "copy_gb_per_second": size_in_gb / copied,
        "digest_gb_per_second": size_in_gb / digested,
        "ratio": statistics.median(one / other for other, one in times),
        "copy_us_a_tensor": 1e6 * copied / count,
        "digest_us_a_tensor": 1e6 * digested / count,
    }


def clock(call: Callable[[], None], where: Tensor) -> float:
    """Return the seconds of a call, until its device has finished."""
    synchronize = torch.cuda.synchronize if where.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
