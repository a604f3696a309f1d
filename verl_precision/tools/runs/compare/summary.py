"""A comparison: a summary of each run, its verdict on a pass bar, the table of all runs, and their curves as PNG."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch.metric_names import K3_KL, LOG_PROB_GAP, PROBS_PEARSON
from verl_precision.mismatch.verdict import Verdict
from verl_precision.tools.runs.curves import PANELS, Panel, mean
from verl_precision.tools.runs.read import REWARD, Rows
from verl_precision.tools.show.figures import new_figure, style
from verl_precision.tools.show.tables import terminal_table

LENGTH, STEP_SECONDS = "response_length/mean", "timing_s/step"
REWARD_STEPS = 10  # steps of the mean reward at each end of a run
# The k3 of a gap of 1.4e-7 nats, FP32's rounding of a log-prob between 1 and 2. Below it, a ratio has no meaning.
_ROUNDING_K3 = 1e-14
STYLES = ("-", "--", ":", "-.")  # of curves that share a colour
COMPARED = ("reward", "gap", "k3", "phantom")  # panels; each is drawn if a run has measured it
_MARKED = 60  # most points of a series whose points have marks
_WIDTH, _HEIGHT, _LINE, _NAMES = 4.6, 3.4, 0.2, 3  # inches of a panel, and of a legend line; names in this line


@dataclass(frozen=True)
class Summary:
    """One run in a few numbers; mismatch figures are means over all steps that have them, in nats per token."""

    steps: int
    reward_first: float  # mean reward of the first `reward_steps` steps
    reward_last: float  # mean reward of the last `reward_steps` steps
    reward_steps: int  # REWARD_STEPS, or half of the steps of a run that is shorter than twice REWARD_STEPS
    length_first: float  # mean response length of the first step's batch, in tokens
    length_last: float
    log_prob_gap: float  # mean |log π - log μ|
    k3_kl: float  # k3 estimate of KL(μ‖π)
    pearson_last: float  # correlation of trainer and rollout probabilities, at the last step that has one
    seconds_per_step: float  # median over steps, because the first step includes warm-up
    seconds_total: float  # wall clock, start-up included
    arm: str  # name of the arm
    precision: str | None = None  # name of the precision preset, or None if the arm leaves it to the recipe
    estimator: str | None = None  # name of the estimator preset, or None if the arm leaves it to the recipe
    seed: int | None = None  # None if no seeds are given
    rescue: str = ""  # in words, if an alarm has continued the run in FP16
    verdict: Verdict | None = None


def summarise(rows: Rows, seconds_total: float, arm: str, **about: Any) -> Summary:
    """Return the summary of a run, with the known fields `about` it; refuse a run that lacks a needed metric."""
    needed = (REWARD, LENGTH, LOG_PROB_GAP, K3_KL, PROBS_PEARSON, STEP_SECONDS)
    # A step may lack a metric: responses that are all equal have no correlation.
    of = {key: [row[key] for row in rows if key in row] for key in needed}
    if missing := [key for key in needed if not of[key]]:
        problem = f"the run did not report {', '.join(missing)}. The mismatch is measured with mismatch.enabled=True, "
        problem += "which every preset sets"
        remedy = "Keep it enabled, and look in the log for a failed measurement."
        raise ConfigurationError(problem, setting="precision", value=arm, remedy=remedy)
    window = max(1, min(REWARD_STEPS, len(of[REWARD]) // 2))
    return Summary(
        steps=len(rows),
        reward_first=mean(of[REWARD][:window]),
        reward_last=mean(of[REWARD][-window:]),
        reward_steps=window,
        length_first=of[LENGTH][0],
        length_last=of[LENGTH][-1],
        log_prob_gap=mean(of[LOG_PROB_GAP]),
        k3_kl=mean(of[K3_KL]),
        pearson_last=of[PROBS_PEARSON][-1],
        seconds_per_step=median(of[STEP_SECONDS]),
        seconds_total=seconds_total,
        arm=arm,
        **about,
    )


def ratios(summaries: list[Summary]) -> dict[str, dict[str, float]]:
    """Return, for each arm after the first of its estimator, how many times larger that first arm's mismatch is."""
    found, firsts = {}, dict[str | None, tuple[str, float, float]]()
    for arm, runs in by_arm(summaries).items():
        gap, k3 = mean(run.log_prob_gap for run in runs), mean(run.k3_kl for run in runs)
        first, first_gap, first_k3 = firsts.setdefault(runs[0].estimator, (arm, gap, k3))
        if arm != first and k3 > _ROUNDING_K3:
            found[f"{first}/{arm}"] = {"log_prob_gap": first_gap / gap, "k3_kl": first_k3 / k3}
    return found


def by_arm(summaries: list[Summary]) -> dict[str, list[Summary]]:
    """Return the runs of each arm, one for each seed; arms are in the order of their first runs."""
    arms = dict.fromkeys(summary.arm for summary in summaries)
    return {arm: [summary for summary in summaries if summary.arm == arm] for arm in arms}


@dataclass(frozen=True)
class PassBar:
    """The mean reward of the last steps must be above a value."""

    above: float  # the value, in the reward's unit
    steps: int  # number of steps of the mean. A pass through the data is a good choice

    def verdict(self, rows: Rows) -> dict[str, float | bool | None]:
        """Judge a run by its metrics of each step; a run shorter than the window is judged over all its steps.

        `reward` is the mean of the last steps. `since` is the step from which the mean has stayed above, or None.
        """
        rewards = [row[REWARD] for row in rows]
        means = [mean(rewards[max(0, end - self.steps) : end]) for end in range(1, len(rewards) + 1)]
        below = [index for index, mean in enumerate(means) if not mean > self.above]  # NaN is not above
        first = below[-1] + 1 if below else 0
        since = rows[first]["step"] if first < len(rows) else None
        return {"reward": means[-1], "passed": since is not None, "since": since}

    def sentence(self, name: str, rows: Rows) -> str:
        """Return the verdict on a run as a sentence for the user."""
        found = self.verdict(rows)
        result = f"passed, above since step {found['since']:.0f}" if found["passed"] else "not passed"
        steps = min(self.steps, len(rows))
        return f"{name}: {REWARD} {found['reward']:.3f} over the last {steps} steps, bar {self.above:g}: {result}"


_CELLS: dict[str, tuple[Callable[[Summary], float], str]] = {
    "steps": (lambda run: run.steps, "{:.0f}"),
    "reward": (lambda run: run.reward_last, "{:.3g}"),
    "|log-prob gap|": (lambda run: run.log_prob_gap, "{:.2e}"),
    "k3 KL": (lambda run: run.k3_kl, "{:.2e}"),
    "Pearson": (lambda run: run.pearson_last, "{:.5f}"),
    "s/step": (lambda run: run.seconds_per_step, "{:.1f}"),
}


def table(summaries: list[Summary]) -> Table:
    """Return the comparison as a table: one row for each arm, with means over its seeds, and one for each ratio."""
    rows = []
    for arm, runs in by_arm(summaries).items():
        cells = [text.format(mean(value(run) for run in runs)) for value, text in _CELLS.values()]
        cells[1] = f"{mean(run.reward_first for run in runs):.3g} -> {cells[1]}"
        rescued = [run.rescue for run in runs if run.rescue]
        count = f"{len(rescued)} " if len(runs) > 1 else ""
        name = arm if len(runs) == 1 else f"{arm} ({len(runs)} seeds)"
        rows.append([f"{name}, {count}{'; '.join(dict.fromkeys(rescued))}" if rescued else name, *cells])
    for name, ratio in ratios(summaries).items():
        rows.append([f"ratio {name}", "", "", f"{ratio['log_prob_gap']:.3g}x", f"{ratio['k3_kl']:.3g}x", "", ""])
    windows = sorted({summary.reward_steps for summary in summaries})
    steps = " to ".join(map(str, dict.fromkeys((windows[0], windows[-1]))))
    title = f"Training-inference mismatch, mean over steps; reward, mean of the first -> last {steps} steps"
    return terminal_table(["arm", *_CELLS], rows, title=title)


def draw_comparison(content: Mapping[str, Any]) -> Figure:
    """Draw a curve for each arm over steps, from the page's content; several seeds are a mean with a shade."""
    curves = content["curves"]
    measured = {name for curve in curves.values() for name in curve}
    panels = [panel for panel in PANELS if panel.name in COMPARED and _first(panel) in measured]
    figure = new_figure(_WIDTH * len(panels), _HEIGHT + _LINE * math.ceil(len(curves) / _NAMES))
    plots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(plots, panels, strict=True):
        _draw(axes, panel, content)
        style(axes, panel.axis, panel.unit, panel.title)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    lines = {line.get_label(): line for axes in plots for line in axes.get_lines()}
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=_NAMES, frameon=False)
    return figure


def _first(panel: Panel) -> str:
    return f"{panel.name}/{next(iter(panel.metrics))}"


def _draw(axes: Axes, panel: Panel, content: Mapping[str, Any]) -> None:
    drawn, positive = list[str](), False
    for name, colour in {run["curve"]: run["colour"] for run in content["runs"]}.items():
        dashes = STYLES[drawn.count(colour) % len(STYLES)]
        drawn.append(colour)
        if series := content["curves"][name].get(_first(panel)):
            steps, means, *limits = ([float(value) for value in row] for row in series)
            marker = "o" if len(steps) <= _MARKED else ""
            axes.plot(steps, means, dashes, linewidth=1.6, markersize=2.8, marker=marker, color=colour, label=name)
            if limits:
                axes.fill_between(steps, limits[0], limits[1], color=colour, alpha=0.2, linewidth=0)
            positive |= any(value > 0 for value in means)
    if panel.log and positive:
        axes.set_yscale("log", base=panel.log)  # a shade from zero starts at the frame
