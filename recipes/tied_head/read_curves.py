"""The reward and the gap of each run, step by step, as a figure and a table.

    python recipes/tied_head/read_curves.py outputs/tied_head/*-* --figure docs/tied_head.png

A run that the guard has ended has no step; it is drawn where it ended, with the layer that its log names.
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

from verl_precision.tools.runs.read import read_metrics
from verl_precision.tools.show.colours import COLOURS
from verl_precision.tools.show.figures import new_figure, style
from verl_precision.tools.show.scripts import folders_of, parser_for_runs
from verl_precision.tools.show.tables import markdown_table, number_text

ARMS = ("repaired", "guarded", "unguarded")
REWARD, K3, PEARSON = "critic/score/mean", "mismatch/k3_kl", "mismatch/probs_pearson"
STOPPED = re.compile(r"Weight sync \d+ did not take: ([\w.]+): ([^\n]*?)\. The rollout")
Curves = dict[str, tuple[list[dict[str, float]], str]]  # by arm: the metrics of each step, and why the run was stopped


def read_curves(folders: list[Path]) -> Curves:
    """Read each arm's newest run."""
    curves: Curves = {}
    for folder in sorted(folders):
        for arm in ARMS:
            if (log := folder / arm / "train.log").is_file():
                file = folder / arm / "metrics.jsonl"
                found = STOPPED.search(log.read_text())
                stopped = f"{found[1]}: {found[2]}" if found else ""
                curves[arm] = (read_metrics(file) if file.is_file() else [], stopped)
    return curves


def table(curves: Curves) -> str:
    """Return a row for each arm as Markdown."""
    rows = []
    for arm, (steps, stopped) in curves.items():
        ends = [f"{steps[0][REWARD]:.1f} to {steps[-1][REWARD]:.1f}"] if steps else ["none"]
        ends += [number_text(max(step[K3] for step in steps)), f"{steps[-1][PEARSON]:.3f}"] if steps else ["", ""]
        rows.append([arm, str(len(steps)), *ends, stopped or "ran to its end"])
    return "\n".join(markdown_table(["run", "steps", "reward", "largest k3", "Pearson, last", "end"], rows))


def draw(curves: Curves) -> Figure:
    """Return reward and k3 by step, a line for each arm that has steps."""
    figure = new_figure(10, 4)
    rewards, gaps = figure.subplots(1, 2)
    for axes, metric in ((rewards, REWARD), (gaps, K3)):
        for colour, (arm, (steps, stopped)) in zip(COLOURS, curves.items(), strict=False):
            line = [step[metric] for step in steps]
            label = f"{arm}: stopped at the first sync" if stopped else arm
            axes.plot(range(1, len(line) + 1), line, "o-", color=colour, markersize=3, label=label)
            if stopped:
                axes.axvline(0, color=colour, linestyle=":")
    style(rewards, "step", "reward (minus the length)")
    style(gaps, "step", "k3, nats per token")
    gaps.set_yscale("log")
    rewards.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Read the folders, print and draw."""
    arguments = parser_for_runs(__doc__, "of a comparison, with <arm>/train.log in it").parse_args()
    curves = read_curves(folders_of(arguments))
    print(table(curves))
    if arguments.figure:
        draw(curves).savefig(arguments.figure, dpi=100)


if __name__ == "__main__":
    main()
