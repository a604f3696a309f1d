"""The reward that is gained, and the spread of log-weights, by the length of the reasoning; measured and predicted.

    python recipes/reasoning_length/read_lengths.py outputs/reasoning_length/*-*
    python recipes/reasoning_length/read_lengths.py tests/data/reasoning_length/sure --figure docs/length.png

The script reads runs in folders <precision>_<estimator>_<tokens>/seed_<n>. The mismatch is the mean of all steps, the
reward that of the first three and of the last four. The prediction needs the k3 and the length alone.
"""

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from verl_precision.mismatch.prediction import predicted_spread
from verl_precision.tools.runs.content import RunView
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.colours import PRECISIONS
from verl_precision.tools.show.figures import new_figure, style
from verl_precision.tools.show.scripts import folders_of, parser_for_runs
from verl_precision.tools.show.tables import markdown_table

FIRST, LAST = 3, 4  # steps
REWARD, K3, LENGTH = "critic/score/mean", "mismatch/k3_kl", "response_length/mean"
SPREAD, SHARE = "mismatch/sequence_log_ratio_std", "mismatch/sequence_ess_fraction"
LINES = {"pg_seq_is": "-", "grpo_token_tis": "--"}
SECONDS = ("timing_s/gen", "timing_s/update_actor", "timing_s/step")
KEPT = (REWARD, K3, SPREAD, SHARE, LENGTH, "actor/is_weight_ess_fraction", "actor/grad_norm", *SECONDS)


class Outcome(NamedTuple):
    """The result of one run at its length; the mismatch is a mean over all steps."""

    precision: str
    estimator: str
    tokens: int  # of reasoning
    seed: str
    steps: int
    k3: float
    spread: float  # nats
    predicted: float  # from k3 and the mean length of each step
    share: float  # effective responses over all responses
    first: float  # reward
    last: float
    seconds: float  # a step, median
    alarms: str

    @property
    def gain(self) -> float:
        """Return what was learned: the last reward less the first."""
        return self.last - self.first


def outcome_of(run: Run) -> Outcome:
    """Read a run in a folder <precision>_<estimator>_<tokens>/seed_<n>."""
    arm, seed = run.path.parts[-3:-1]
    precision, _, rest = arm.partition("_")
    estimator, _, tokens = rest.rpartition("_")

    def mean(metric: str, rows: slice = slice(None)) -> float:
        return statistics.fmean(row[metric] for row in run.rows[rows])

    predicted = statistics.fmean(predicted_spread(row[K3], row[LENGTH]) for row in run.rows)
    alarms = ", ".join(f"{name} {step}" for name, step in RunView(run, 0).first_alarms.items())
    return Outcome(
        *(precision, estimator, int(tokens), seed.removeprefix("seed_"), len(run.rows)),
        *(mean(K3), mean(SPREAD), predicted, mean(SHARE)),
        *(mean(REWARD, slice(FIRST)), mean(REWARD, slice(-LAST, None))),
        *(statistics.median(row["timing_s/step"] for row in run.rows), alarms or "none"),
    )


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as Markdown, by length."""
    columns = ["tokens", "estimator", "precision", "seed", "k3", "spread", "√(2 k3 T)", "effective share", "exp(-s²)"]
    columns += ["reward, first", "last", "gain", "s a step", "alarms, by step"]
    rows = []
    for each in sorted(outcomes, key=lambda one: (one.tokens, one.estimator != "pg_seq_is", one.precision, one.seed)):
        arm = f"{each.tokens:,}", f"`{each.estimator}`", each.precision, each.seed
        share = math.exp(-(each.predicted**2))
        gap = f"{each.k3:.1e}", *(f"{x:.2f}" for x in (each.spread, each.predicted, each.share, share))
        reward = f"{each.first:.2f}", f"{each.last:.2f}", f"{each.gain:+.2f}"
        rows.append([*arm, *gap, *reward, f"{each.seconds:.0f}", each.alarms])
    return "\n".join(markdown_table(columns, rows))


def by_length(outcomes: list[Outcome]) -> str:
    """Return a row for each length as Markdown: BF16's spread and effective share, and the gains of reward by seed."""
    columns = ["tokens T", "spread in BF16", "√(2 k3 T)", "effective share"]
    columns += [f"{precision.upper()}, `{name}`" for name in LINES for precision in PRECISIONS]
    rows = []
    for tokens in sorted({each.tokens for each in outcomes}):
        same = [each for each in outcomes if each.tokens == tokens]
        if not (bf16 := [each for each in same if (each.precision, each.estimator) == ("bf16", "pg_seq_is")]):
            continue
        means = (statistics.fmean(getattr(each, name) for each in bf16) for name in ("spread", "predicted", "share"))
        arms = [(precision, name) for name in LINES for precision in PRECISIONS]
        gains = [[f"{each.gain:+.2f}" for each in same if (each.precision, each.estimator) == arm] for arm in arms]
        rows.append([f"{tokens:,}", *(f"{mean:.2f}" for mean in means), *map(", ".join, gains)])
    return "\n".join(markdown_table(columns, rows))


def draw(outcomes: list[Outcome]) -> Figure:
    """Return spread and gain of reward against the length: a point for each run, lines through the means."""
    figure = new_figure(10, 4)
    spreads, gains = figure.subplots(1, 2)
    for (precision, colour), estimator in ((each, name) for each in PRECISIONS.items() for name in LINES):
        own = [each for each in outcomes if (each.precision, each.estimator) == (precision, estimator)]
        lengths = sorted({each.tokens for each in own})
        at = {length: [each for each in own if each.tokens == length] for length in lengths}
        gain = [statistics.fmean(each.gain for each in at[length]) for length in lengths]
        label = f"{precision.upper()}, {estimator}"
        gains.plot(lengths, gain, LINES[estimator], color=colour, label=label)
        gains.plot([each.tokens for each in own], [each.gain for each in own], "o", color=colour, alpha=0.5)
        if estimator == "pg_seq_is" and own:
            shortest = statistics.fmean(each.k3 for each in at[lengths[0]])
            drawn = [2**power for power in range(7, 14)]
            predicted = [predicted_spread(shortest, length) for length in drawn]
            spreads.plot(
                drawn, predicted, ":", color=colour, label=f"{precision.upper()}, predicted from {lengths[0]} tokens"
            )
        spreads.plot([each.tokens for each in own], [each.spread for each in own], "o", color=colour, alpha=0.5)
    style(spreads, "tokens of reasoning", "spread of log-weights, nats")
    style(gains, "tokens of reasoning", f"reward, last {LAST} steps less first {FIRST}")
    for axes in (spreads, gains):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False, fontsize=8)
    spreads.set_yscale("log")
    gains.set_ylim(bottom=min(0, *(each.gain for each in outcomes)))
    return figure


def record(runs: list[Run], folder: Path) -> None:
    """Write the metrics of the study, of each run, where a repository can keep them."""
    for run in runs:
        target = folder.joinpath(*run.path.parts[-3:])
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w") as file:
            for row in run.rows:
                data = {key: float(f"{row[key]:.6g}") for key in KEPT if key in row}
                file.write(json.dumps({"step": int(row["step"]), "data": data}) + "\n")


def main() -> None:
    """Read the folders, print and draw."""
    parser = parser_for_runs(__doc__, "with <precision>_<estimator>_<tokens>/seed_<n> in it")
    parser.add_argument("--record", type=Path, help="a folder that gets the rows of each run, in short")
    arguments = parser.parse_args()
    runs = read_runs(folders_of(arguments))
    outcomes = [outcome_of(run) for run in runs]
    print(table(outcomes), by_length(outcomes), sep="\n\n")
    if arguments.figure:
        draw(outcomes).savefig(arguments.figure, dpi=100)
    if arguments.record:
        record(runs, arguments.record)


if __name__ == "__main__":
    main()
