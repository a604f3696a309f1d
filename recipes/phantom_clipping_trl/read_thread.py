"""Read the runs of run_arms.py: a table of the arms, one of what the thread claims, and a figure.

    python recipes/phantom_clipping_trl/read_thread.py outputs/phantom_clipping_trl

The first two tables are those of recipes/phantom_clipping/read_stall.py. A cell of the third has the seeds one after
the other. Early and late are means of the first and of the last nine steps.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "phantom_clipping"))
from read_stall import STALLED, WINDOW, tables

from verl_precision.tools.runs.compare.summary import draw_comparison
from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.figures import write_png

LIKELY, UNLIKELY = "prob_1e-1_1", "prob_1e-3_1e-2"
DRAWN = (STALLED, "shadow", "autocast", "fp16")  # arms of the figure; more hide each other
FIRST, LAST, ALL = slice(0, WINDOW), slice(-WINDOW, None), slice(None)
# What the thread names -> metric, its steps, its format.
CLAIMS = {
    "k3, responses of the current weights": ("mismatch/behind_0/k3_kl", ALL, ".1e"),
    "phantom-clipped, early": ("phantom/phantom_clipped_fraction", FIRST, ".1%"),
    "phantom-clipped, late": ("phantom/phantom_clipped_fraction", LAST, ".1%"),
    "of tokens with A > 0, late": ("phantom/phantom_clipped_fraction_positive_advantage", LAST, ".0%"),
    "beta beyond the clip, early": ("phantom/beta_beyond_clip_fraction", FIRST, ".1%"),
    "beta": ("phantom/beta_mean", ALL, "+.4f"),
    "beta where A > 0": ("phantom/beta_mean_positive_advantage", ALL, "+.3f"),
    "beta where A < 0": ("phantom/beta_mean_negative_advantage", ALL, "+.3f"),
    "abs beta, likely tokens, early": (f"phantom/{LIKELY}/beta_abs_mean", FIRST, ".3f"),
    "abs beta, unlikely tokens, early": (f"phantom/{UNLIKELY}/beta_abs_mean", FIRST, ".3f"),
    "abs beta, likely tokens, late": (f"phantom/{LIKELY}/beta_abs_mean", LAST, ".3f"),
    "abs beta, unlikely tokens, late": (f"phantom/{UNLIKELY}/beta_abs_mean", LAST, ".3f"),
    "gradient weights with over without beta, A > 0": ("weights/with_over_without_positive_advantage", ALL, ".3f"),
    "the same, A < 0": ("weights/with_over_without_negative_advantage", ALL, ".3f"),
    "correlation of both weights": ("weights/correlation", ALL, ".3f"),
    "weights that cross to another BF16 number, early": ("precision/bf16_crossings_fraction", FIRST, ".1%"),
    "the same, late": ("precision/bf16_crossings_fraction", LAST, ".1%"),
}


def claims(runs: list[Run]) -> str:
    """Return what the thread claims, arm by arm, as Markdown; an arm without a metric has an empty cell."""
    arms: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.path.parts[-3] != STALLED, run.path.parts)):
        arms.setdefault(run.path.parts[-3], []).append(run)
    lines = ["| | " + " | ".join(f"`{arm}`" for arm in arms) + " |", "|---|" + "---|" * len(arms)]
    for words, (metric, steps, form) in CLAIMS.items():
        cells = []
        for seeds in arms.values():
            of_seeds = [[row[metric] for row in run.rows[steps] if metric in row] for run in seeds]
            cells.append(", ".join(format(statistics.fmean(values), form) for values in of_seeds if values))
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the folder, print the tables, and draw reward, gap and phantom-clipped share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="with <arm>/seed_<n> in it; phantom_clipping_trl.png is written there"
    )
    folder = parser.parse_args().folder
    runs = read_runs([folder])
    print(tables(runs), claims(runs), sep="\n\n")
    drawn = [run for run in runs if run.path.parts[-3] in DRAWN] or runs
    write_png(folder / "phantom_clipping_trl.png", draw_comparison(recorded_content(drawn)), "Phantom clipping in TRL")


if __name__ == "__main__":
    main()
