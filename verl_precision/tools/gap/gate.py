"""A gate for CI: which k3 is above its bar, and which has moved since an earlier job, both beyond chance.

Chance is that of the responses: with the standard error s of a k3, its 95% interval is k3 ± 1.96 s.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_precision.base.errors import CheckFailedError, ConfigurationError
from verl_precision.tools.gap.pairs import Pair, measure_mismatch
from verl_precision.tools.jobs.settings import MismatchJob
from verl_precision.tools.show.tables import number_text, terminal_table

CERTAIN = 1.96  # standard errors


def measure_and_judge(job: MismatchJob, console: Console) -> None:
    """Measure, show what has moved since the earlier job, and raise CheckFailedError where a k3 is above its bar."""
    earlier = read_summary(job.against) if job.against else None
    pairs = measure_mismatch(job, console)
    if earlier is not None:
        console.print(terminal_table(*moved(earlier, read_summary(job.folder / "summary.json"))))
    for line in judged(pairs, job.bars()):
        console.print(line, highlight=False, soft_wrap=True)


def judged(pairs: list[Pair], bars: Mapping[tuple[str, str], float]) -> list[str]:
    """Return a line for each k3 that has a bar; raise CheckFailedError if one is above it, or cannot be judged."""
    lines: dict[str, bool] = {}  # whether it fails
    for pair in (pair for pair in pairs if (pair.rollout, pair.train) in bars):
        bar, chance = bars[pair.rollout, pair.train], CERTAIN * pair.k3_error
        low, high = pair.k3 - chance, pair.k3 + chance
        verdict = "above" if low > bar else "below" if high < bar else "within chance"
        verdict = "cannot be judged" if math.isnan(low) else verdict
        interval = f"k3 {number_text(pair.k3)} ({number_text(low)} to {number_text(high)})"
        line = f"rollout {pair.rollout}, train {pair.train}: {interval}, bar {number_text(bar)}: {verdict}"
        lines[line] = verdict in ("above", "cannot be judged")
    if any(lines.values()):
        failed = "; ".join(line for line, fails in lines.items() if fails)
        allowed = "a 95% interval that is not wholly above the bar, of at least two responses with finite log-probs"
        remedy = "verl-precision explain finds the cause of a gap."
        raise CheckFailedError(f"--fail-above: {failed}", allowed=allowed, remedy=remedy)
    return [*lines]


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a job with its pairs by name; ConfigurationError if the file is none."""
    try:
        found = json.loads(path.read_text())
        pairs = {f"{each['rollout']}, {each['train']}": each for each in found["pairs"]}
        return {"pairs": pairs, "about": {**found["versions"], **found["settings"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it is no summary.json of verl-precision mismatch ({type(error).__name__}: {error})"
        raise ConfigurationError(problem, setting="--against", value=str(path)) from None


def moved(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: the k3 of both summaries by pair, then the versions and settings that differ."""
    rows = []
    for name, pair in now["pairs"].items():
        (old, before), (new, after) = map(_k3, (earlier["pairs"].get(name, {}), pair))
        beyond, ratio = abs(new - old) - CERTAIN * math.hypot(before, after), new / old if old else math.nan
        verdict = "unknown" if math.isnan(beyond) else "yes" if beyond > 0 else "no"
        rows.append([name, *map(number_text, (old, new, ratio)), verdict])
    old, new = earlier["about"], now["about"]
    differ = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    rows += [[name, str(old.get(name, "")), str(new.get(name, "")), "", ""] for name in differ]
    return ["rollout, train", "before", "now", "ratio", "beyond chance"], rows


def _k3(pair: Mapping[str, Any]) -> tuple[float, float]:
    """Return a pair's k3 and its standard error; NaN for what its summary does not have."""
    k3, error = (pair.get(key) for key in ("mismatch/k3_kl", "k3_kl_standard_error"))
    return math.nan if k3 is None else k3, math.nan if error is None else error
