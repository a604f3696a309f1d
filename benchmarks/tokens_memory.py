"""Peak memory and speed of `verl-precision tokens` on generated dumps in the plain JSONL format.

python benchmarks/tokens_memory.py
python benchmarks/tokens_memory.py --megabytes 10000 --folder /scratch    # target: at most 2 GiB
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch


def write_dumps(folder: Path, megabytes: int, tokens: int, per_file: int = 64) -> int:
    """Write files of at most `per_file` MB, one for each step, and return the bytes of all."""
    random, size, step = torch.Generator().manual_seed(0), 0, 0
    while size < megabytes * 1e6:
        step += 1
        path = folder / f"{step}.tokens.jsonl"
        mu = -torch.empty(16, tokens).exponential_(2.5, generator=random)
        pi = (mu + 0.02 * torch.randn(mu.shape, generator=random)).clamp(max=0)
        pairs = zip(pi.tolist(), mu.tolist(), strict=True)
        rows = [{"format": 1, "step": step, "trainer_log_probs": a, "rollout_log_probs": b} for a, b in pairs]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        wanted = min(per_file, megabytes - size / 1e6) * 1e6
        path.write_text(lines * max(1, round(wanted / len(lines))))
        size += path.stat().st_size
    return size


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--megabytes", type=int, default=64)
    made.add_argument("--tokens", type=int, default=2048, help="of each response")
    made.add_argument("--folder", type=Path, help="where a temporary folder is made")
    given = made.parse_args()
    with TemporaryDirectory(dir=given.folder) as folder:
        size = write_dumps(Path(folder), given.megabytes, given.tokens)
        start = time.perf_counter()
        words = [sys.executable, "-m", "verl_precision.cli", "tokens", folder, "-o", f"{folder}/out"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{size / 1e6:,.0f} MB read in {seconds:.1f} s ({size / 1e6 / seconds:.0f} MB/s), peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
