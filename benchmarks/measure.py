"""Shared by the benchmarks: timing of calls in turns, records of results, physical limits of the machine."""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Record:
    """A comparison of this package's code (ours) with the peer that a user would run instead; less is better.

    Attributes:
        what: The measured code and its size: the record's name.
        peer: The code that a user would run instead.
        unit: Unit of the times, or sizes, of both.
        ours: Median of ours.
        theirs: Median of the peer.
        ratio: Median over the pairs of ours / theirs.
        spread: Lower and upper quartile of these ratios.
        at_most: Target: the largest ratio, or None.
        ours_at_most: Target: the largest value of ours, in `unit`, or None.
        limit: The best possible implementation, in words; empty if unknown.
        least: Value of ours at that limit, in `unit`.
        growth: Growth of ours with its sizes, in words.
        noise: Ratio below which differences have no meaning.
    """

    what: str
    peer: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    spread: tuple[float, float]
    at_most: float | None = None
    ours_at_most: float | None = None
    limit: str = ""
    least: float | None = None
    growth: str = ""
    noise: float = 0.0

    def target(self) -> str:
        """Return in words the target, and whether it is met; empty without a target."""
        found, most, unit = self.ratio, self.at_most, ""
        if self.ours_at_most is not None:
            found, most, unit = self.ours, self.ours_at_most, f" {self.unit}"
        if most is None:
            return ""
        asked = f"at most {most:g}{unit}"
        by = f"{found / most - 1:.1%} more" if found < 2 * most else f"{found / most:.3g} times that"
        return f"met: {asked}" if found <= most else f"missed: {asked}, and it is {by}"

    def amount(self, value: float) -> str:
        """Return a value with the unit."""
        return f"{value:.3g} {self.unit}" if value < 1000 else f"{value:,.0f} {self.unit}"

    def line(self) -> str:
        """Return the record on one line."""
        ratio = f"{self.ratio:.3g} times ({self.spread[0]:.3g} to {self.spread[1]:.3g})"
        both = f"{self.amount(self.ours)}, {ratio} the {self.amount(self.theirs)} of {self.peer}"
        limit = f"{self.least / self.ours:.0%} of the limit, {self.limit}" if self.least else ""
        return "; ".join(part for part in (f"{self.what}: {both}", self.target(), limit, self.growth) if part)


def record(what: str, peer: str, unit: str, ours: list[float], theirs: list[float], **others: Any) -> Record:
    """Return a record of values that were measured in pairs; `others` are further fields of the record."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Record(what, peer, unit, statistics.median(ours), statistics.median(theirs), middle, (low, high), **others)


def alternate(calls: dict[str, Callable[[], object]], repeats: int, seconds: float = 40.0) -> dict[str, list[float]]:
    """Return the milliseconds of every call; the calls take turns, so that a busy machine slows all of them.

    Each is called once before. The order is reversed in every round, so that no call always follows the same one.
    The rounds end after `repeats`, on a slow machine after `seconds`, but not before the third.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    start = time.monotonic()
    for repeat in range(repeats):
        if repeat >= 3 and time.monotonic() - start > seconds:
            break
        for name in list(calls)[:: -1 if repeat % 2 else 1]:
            times[name].append(1e3 * clock(calls[name]))
    return times


def clock(call: Callable[[], object]) -> float:
    """Return the seconds of a call, until a GPU has finished too."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def growth(times: dict[str, list[float]], whole: str, halves: dict[str, str]) -> str:
    """Return the growth of the time of `whole`, in words; `halves` maps a size to the call with half of that size."""
    grown = {what: statistics.median(a / b for a, b in zip(times[whole], times[half], strict=True))
             for what, half in halves.items()}  # fmt: skip
    return ", ".join(f"{times:.1f} times with twice the {what}" for what, times in grown.items())


def bandwidth(device: str = "cpu") -> float:
    """Return the bytes per millisecond that torch's fastest copy of 256 MiB reads and writes."""
    source = torch.ones(256 * MIB // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(alternate({"copy": lambda: target.copy_(source)}, 5)["copy"])


@functools.cache
def matmul_peak(dtype: torch.dtype) -> float:
    """Return the floating-point operations per millisecond of torch's fastest matrix products."""
    best = 0.0
    for rows, inner, columns in ((256, 256, 768), (512, 512, 512), (1024, 1024, 1024)):
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        took = min(alternate({"product": lambda a=a, b=b: a @ b}, 3)["product"])
        best = max(best, 2 * rows * inner * columns / took)
        if took > 100:  # a CPU without kernels for this dtype: larger products are no faster
            break
    return best


def peak_memory(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that the call allocated: on a GPU, if there is one, otherwise on the CPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def actor_config(estimator: str, response_tokens: int, *overrides: str) -> Any:
    """Return verl's typed ActorConfig of verl's own config with one of this package's estimators."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    chosen = [
        "hydra.searchpath=[pkg://verl_precision.presets]",
        f"+estimator={estimator}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"data.max_response_length={response_tokens}",
        *overrides,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=chosen)
    OmegaConf.resolve(config)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a benchmark's parser, with the options of all benchmarks."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=repeats, help=f"timed calls of each function (default {repeats})")
    made.add_argument("--json", type=Path, help="file to write the records to")
    return made


def report(records: Iterable[Record], json_file: Path | None) -> None:
    """Print each record as soon as it is measured, and write all to a file if one is named. verl prints to stderr."""
    found, out = [], sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for one in records:
            print(one.line(), file=out, flush=True)
            found.append(asdict(one))
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
