"""The depth of the stall: read the folders that `make phantom` or the whole grid wrote, and print two tables.

    python recipes/phantom_clipping/read_stall.py outputs/phantom_clipping/*-*

The gain of a run is its progress from the mean reward of its first nine steps towards 0, the best reward; each value is
a mean over nine steps. The stall is read at the step where the median cured run has half of the possible gain.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from verl_precision.tools.runs.content import RunView
from verl_precision.tools.runs.read import Run, read_runs

REWARD, CLIPPED, GAP = "critic/score/mean", "phantom/final_token_clip_fraction", "mismatch/final_token_gap_mean"
CROSSINGS, K3 = "precision/bf16_crossings_fraction", "mismatch/k3_kl"
CURED, STALLED, WINDOW = ("shadow", "ratio_one", "unclipped", "stochastic"), "clipped", 9


def series(run: Run, metric: str) -> list[float]:
    """Return a metric of all steps; 0 where a run has none, because its loss does not clip."""
    return [row.get(metric, 0.0) for row in run.rows]


def gains(run: Run) -> list[float]:
    """Return the share of the possible gain at each step; the first WINDOW - 1 steps count as 0."""
    reward = series(run, REWARD)
    means = [statistics.fmean(reward[i - WINDOW : i]) for i in range(WINDOW, len(reward) + 1)]
    return [0.0] * (WINDOW - 1) + [1 - mean / means[0] for mean in means]


def half_gain_step(run: Run) -> float:
    """Return the first step with half of the possible gain; infinity if there is none."""
    return next((step for step, gain in enumerate(gains(run), 1) if gain >= 0.5), float("inf"))


def tables(runs: list[Run]) -> str:
    """Return both tables as Markdown."""
    arms: dict[str, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        arms[run.path.parts[-3]][run.path.parts[-2]] = run
    lines = [
        "| arm | seed | reward, first 9 steps | last 9 | half of the gain at step | final tokens clipped, A > 0 | "
    ]
    lines[0] += "their gap, nats | BF16 crossings | k3 | alarms, by step |"
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for arm, seeds in arms.items():
        for seed, run in sorted(seeds.items()):
            reward = series(run, REWARD)
            first, last = statistics.fmean(reward[:WINDOW]), statistics.fmean(reward[-WINDOW:])
            clipped, gap, crossings, k3 = (
                statistics.fmean(series(run, name)[2 * WINDOW :] or series(run, name))  # of a short run, all steps
                for name in (CLIPPED, GAP, CROSSINGS, K3)
            )
            half = half_gain_step(run)
            alarms = ", ".join(f"{name} {step}" for name, step in RunView(run, 0).first_alarms.items()) or "none"
            lines.append(
                f"| `{arm}` | {seed.removeprefix('seed_')} | {first:.2f} | {last:.2f} | "
                f"{half if half < float('inf') else 'none'} | {clipped:.0%} | {gap:.3f} | {crossings:.1%} | {k3:.1e} | "
                f"{alarms} |"
            )
    cured = sorted(half_gain_step(run) for arm in CURED for run in arms.get(arm, {}).values())
    if not cured or STALLED not in arms or statistics.median(cured) == float("inf"):
        return "\n".join(lines)
    step = round(statistics.median(cured))
    lines += ["", f"At step {step} the median of {len(cured)} cured runs has half of the possible gain; then has", ""]
    lines += ["| arm | share of the gain, by seed |", "|---|---|"]
    for arm, seeds in arms.items():
        shares = ", ".join(f"{gains(run)[step - 1]:.0%}" for _, run in sorted(seeds.items()) if len(run.rows) >= step)
        lines.append(f"| `{arm}` | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Read the folders and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of a comparison, with <arm>/seed_<n> in it")
    folders = [folder for folder in parser.parse_args().folders if folder.is_dir()]
    print(tables(read_runs(folders)))


if __name__ == "__main__":
    main()
