"""The dose-response curve: the final reward of a run against its mismatch, in each precision.

    python recipes/collapse/read_doses.py outputs/collapse/*-* --figure outputs/collapse/doses.png

The script reads the folders of comparisons of the arms bf16_K, fp16_K and bf16_exact_K, prints a table, and draws the
reward over steps and the curve. The mismatch is the mean of the first ten steps, before the runs differ. The reward is
the mean of the last ten.
"""

import statistics
from typing import NamedTuple

from matplotlib.figure import Figure

from verl_precision.tools.runs.content import RunView
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.colours import COLOURS, PRECISIONS
from verl_precision.tools.show.figures import new_figure, style
from verl_precision.tools.show.scripts import folders_of, parser_for_runs
from verl_precision.tools.show.tables import markdown_table

WINDOW = 10  # steps
LINES = PRECISIONS | {"bf16_exact": COLOURS[2]}
REWARD, K3, PEARSON = "critic/score/mean", "mismatch/k3_kl", "mismatch/probs_pearson"
SPREAD, SAMPLE = "mismatch/sequence_log_ratio_std", "mismatch/sequence_ess"


class Outcome(NamedTuple):
    """The result of one run at its dose; all values are means over WINDOW steps."""

    precision: str
    dose: int
    seed: str
    steps: int
    k3: float  # first
    pearson: float
    spread: float
    sample: float  # responses
    reward_first: float
    reward_best: float  # of any WINDOW steps
    reward_last: float
    rewards: list[float]  # means over WINDOW steps
    alarms: str


def outcome_of(run: Run) -> Outcome:
    """Read a run in a folder <precision>_<dose>/seed_<n>."""
    precision, _, dose = run.path.parts[-3].rpartition("_")

    def mean(metric: str, rows: slice) -> float:
        return statistics.fmean(row[metric] for row in run.rows[rows])

    first, last = slice(0, WINDOW), slice(-WINDOW, None)
    rewards = [mean(REWARD, slice(i, i + WINDOW)) for i in range(max(1, len(run.rows) - WINDOW + 1))]
    alarms = ", ".join(f"{name} {step}" for name, step in RunView(run, 0).first_alarms.items())
    return Outcome(
        *(precision, int(dose), run.path.parts[-2].removeprefix("seed_"), len(run.rows)),
        *(mean(metric, first) for metric in (K3, PEARSON, SPREAD, SAMPLE, REWARD)),
        *(max(rewards), mean(REWARD, last), rewards, alarms or "none"),
    )


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as Markdown, by dose."""
    columns = ["logits", "precision", "seed", "steps", "k3", "Pearson", "spread of log-weights", "effective responses"]
    columns += ["reward, first", "best", "last", "alarms, by step"]
    rows = [
        [
            *(str(each.dose), each.precision, each.seed, str(each.steps), f"{each.k3:.1e}", f"{each.pearson:.4f}"),
            *(f"{each.spread:.2f}", f"{each.sample:.0f}", f"{each.reward_first:.2f}", f"{each.reward_best:.2f}"),
            *(f"{each.reward_last:.2f}", each.alarms),
        ]
        for each in sorted(outcomes, key=lambda each: (each.dose, each.precision, each.seed))
    ]
    return "\n".join(markdown_table(columns, rows))


def draw(outcomes: list[Outcome]) -> Figure:
    """Return the rewards over steps, and the curve: a point for each run, a line through the means of the doses."""
    figure = new_figure(10, 4)
    over_steps, curve = figure.subplots(1, 2, sharey=True)
    largest = max(each.dose for each in outcomes) or 1
    for precision, colour in LINES.items():
        own = [each for each in outcomes if each.precision == precision]
        if not own:
            continue
        for each in own:  # the larger the dose, the stronger the line
            steps = range(WINDOW, WINDOW + len(each.rewards))
            over_steps.plot(steps, each.rewards, color=colour, alpha=0.25 + 0.75 * each.dose / largest)
        curve.plot([each.k3 for each in own], [each.reward_last for each in own], "o", color=colour, alpha=0.6)
        doses = [[each for each in own if each.dose == dose] for dose in sorted({each.dose for each in own})]
        k3 = [statistics.fmean(each.k3 for each in same) for same in doses]
        reward = [statistics.fmean(each.reward_last for each in same) for same in doses]
        curve.plot(k3, reward, color=colour, label=precision.upper().replace("_EXACT", ", exact"))
    style(over_steps, "training step", f"reward, mean of {WINDOW} steps")
    style(curve, "k3 of the first steps, nats per token")
    curve.set_xscale("symlog", linthresh=1e-6)  # exact arithmetic has a k3 of 0
    curve.set(xlim=(0, None), ylim=(0, 1))
    curve.legend(frameon=False)
    return figure


def main() -> None:
    """Read the folders, print and draw."""
    arguments = parser_for_runs(__doc__, "of a comparison, with <precision>_<dose>/seed_<n> in it").parse_args()
    outcomes = [outcome_of(run) for run in read_runs(folders_of(arguments))]
    print(table(outcomes))
    if arguments.figure:
        draw(outcomes).savefig(arguments.figure, dpi=100)


if __name__ == "__main__":
    main()
