"""Which metrics are shown and how they look over steps: the figures of the report and of `verl-precision compare`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import LineStyleType

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm import Alarm
from verl_precision.runs.read import Run


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: Id on the page.
        title: Title above the plot.
        unit: Label of the vertical axis.
        metrics: Up to four metrics by their label; of `a or b` the first is shown that a run has.
        log: Base of a logarithmic axis, on which only positive values are drawn; 0 for a linear axis.
        hint: How to read the plot.
    """

    name: str
    title: str
    unit: str
    metrics: Mapping[str, str]
    log: int = 0
    hint: str = ""

    def title_of(self, label: str) -> str:
        """Return the title of one curve, without the plot."""
        return self.title if len(self.metrics) == 1 else f"{self.title}: {label}"


_PEARSON = keys.PROBS_PEARSON  # shown as its distance from 1
_EXTREMES = {"max π - μ": keys.PROB_GAP_MAX, "min π - μ": keys.PROB_GAP_MIN}
_CLIP = {
    "A > 0": "actor/clip_fraction_high",
    "A < 0": "actor/clip_fraction_low",
    "all (verl's losses)": "actor/pg_clipfrac",
    "dual clip (verl's losses)": "actor/pg_clipfrac_lower",
}
PANELS = (
    Panel("reward", "Reward", "mean score", {"reward": "critic/score/mean or critic/rewards/mean"}),
    Panel("length", "Response length", "tokens, mean", {"length": "response_length/mean"}),
    Panel("k3", "Mismatch: k3 KL(μ‖π)", "nats per token", {"k3": keys.K3_KL}, 10, "0 is best"),
    Panel("gap", "Mismatch: mean |log π - log μ|", "nats per token", {"gap": keys.LOG_PROB_GAP}, 10, "0 is best"),
    Panel("pearson", "1 - correlation of π and μ", "1 - Pearson's r", {"1 - r": _PEARSON}, 10, "0 is best"),
    Panel("extremes", "Extremes of π - μ", "probability", _EXTREMES, hint="towards ±1 before a collapse"),
    Panel("alpha_beta", "α (policy) and β (precision)", "nats, mean |·|", {"α": keys.ALPHA, "β": keys.BETA}, 10),
    Panel("beta_beyond", "Tokens with |β| beyond the clip range", "fraction", {"beyond": keys.BETA_BEYOND_CLIP}),
    Panel("phantom", "Phantom-clipped tokens", "fraction", {"phantom": keys.PHANTOM}, hint="0 is best"),
    Panel("clip", "Clipped tokens", "fraction", _CLIP),
    Panel("scale", "Loss scale", "S", {"scale": keys.LOSS_SCALE}, 2, "FP16 only"),
    Panel("skipped", "Skipped updates", "per step", {"skipped": keys.SKIPPED_STEPS}, hint="0 is best"),
    Panel("grad_norm", "Gradient norm", "before clipping", {"norm": "actor/grad_norm"}, 10),
)


def points_of(run: Run, metric: str) -> dict[int, float]:
    """Return a metric of a run by step; steps at which it was not measured are left out, NaN stays."""
    for key in metric.split(" or "):
        found = {int(row["step"]): value for row in run.rows if (value := keys.value_of(row, key)) is not None}
        if found:
            return {step: 1 - value for step, value in found.items()} if key == _PEARSON else found
    return {}


# Colours of the runs, in order. Each stands out from a white ground, and from its neighbours for the colour-blind.
COLOURS = ("#2563c9", "#d9622b", "#2a8f62", "#8a4fc2", "#b8860b", "#c2417f", "#1a8fa3", "#6b7079")
STYLES: tuple[LineStyleType, ...] = ("-", "--", ":", "-.")  # of the curves of a panel
# Points are marked in short series only.
MARKED = 60


def write_comparison(path: Path, runs: list[Run], title: str) -> None:
    """Write reward and mismatch over steps as one PNG."""
    chosen = [panel for name in ("reward", "gap", "k3") for panel in PANELS if panel.name == name]
    figure = draw(chosen, runs)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def svg(panel: Panel, runs: list[Run], alarms: Mapping[str, Sequence[Alarm]]) -> bytes:
    """Return a panel as an SVG document; the same runs give the same bytes."""
    out = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.name}):
        draw([panel], runs, alarms).savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def draw(panels: Sequence[Panel], runs: list[Run], alarms: Mapping[str, Sequence[Alarm]] | None = None) -> Figure:
    """Draw panels side by side: colour tells runs apart, line style the curves, vertical lines are alarms.

    Args:
        panels: Panels with a point in at least one run.
        runs: At most as many runs as there are colours.
        alarms: Alarms of each run, by its name. A full line is an alarm about this panel's metric, a dotted line one
            about another.

    Raises:
        ConfigurationError: If there are more runs than colours.
    """
    if len(runs) > len(COLOURS):
        raise ConfigurationError(
            f"{len(runs)} runs: allowed are up to {len(COLOURS)} in one figure. Make several reports."
        )
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    legend: dict[str, Line2D] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_alarms(axes, panel, runs, alarms or {})
        legend |= _draw_curves(axes, panel, runs)
        axes.set_title(panel.title, pad=12)  # leaves room for the mark of an alarm
        axes.set(xlabel="step", ylabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(color="#e4e5e7", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_curves(axes: Axes, panel: Panel, runs: list[Run]) -> dict[str, Line2D]:
    """Draw every curve; return what the legend says of runs and, where there are several, of curves."""
    series = [
        (run, label, colour, style, points)
        for run, colour in zip(runs, COLOURS, strict=False)
        for (label, metric), style in zip(panel.metrics.items(), STYLES, strict=False)
        if (points := points_of(run, metric))
    ]
    log = bool(panel.log) and any(value > 0 for *_, points in series for value in points.values())
    for _, _, colour, style, points in series:
        shown = [value if math.isfinite(value) and (value > 0 or not log) else math.nan for value in points.values()]
        look: dict[str, Any] = {"linewidth": 1.6, "markersize": 2.8, "marker": "o" if len(points) <= MARKED else ""}
        axes.plot(list(points), shown, color=colour, linestyle=style, **look)
    if log:
        axes.set_yscale("log", base=panel.log)
    elif axes.dataLim.y0 == 0:  # counts and fractions stand on the axis
        axes.set_ylim(0, None if axes.dataLim.y1 > 0 else 1)
    of_runs = {run.name: Line2D([], [], color=colour, linewidth=3) for run, _, colour, *_ in series}
    of_curves = {label: Line2D([], [], color="black", linestyle=style) for _, label, _, style, _ in series}
    return of_runs | of_curves if len(panel.metrics) > 1 else of_runs


def _draw_alarms(axes: Axes, panel: Panel, runs: list[Run], alarms: Mapping[str, Sequence[Alarm]]) -> None:
    shown = {key for metric in panel.metrics.values() for key in metric.split(" or ")}
    for run, colour in zip(runs, COLOURS, strict=False):
        for alarm in alarms.get(run.name, ()):
            own = alarm.metric in shown
            axes.axvline(alarm.step, color=colour, linestyle="-" if own else ":", alpha=0.9 if own else 0.55)
            if own:
                top = axes.get_xaxis_transform()
                axes.plot(alarm.step, 1, "v", color=colour, markersize=7, transform=top, clip_on=False)
