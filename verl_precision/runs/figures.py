"""How each metric looks over steps: a figure a panel for the report, one of three for `verl-precision compare`."""

import math
from collections.abc import Mapping, Sequence
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
from verl_precision.mismatch.alarm import Alarm
from verl_precision.runs.panels import PANELS, Panel, points_of
from verl_precision.runs.read import Run

# Of the runs, in their order. Each stands out from a white ground, and from its neighbours for the colour-blind.
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
        panels: each with a point in at least one run.
        runs: as many as there are colours, or fewer.
        alarms: of each run, by name; a full line is one about this panel's metric, a dotted one about another.

    Raises:
        ConfigurationError: with more runs than colours.
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
        (run, curve, colour, style, points)
        for run, colour in zip(runs, COLOURS, strict=False)
        for curve, style in zip(panel.curves, STYLES, strict=False)
        if (points := points_of(run, curve))
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
    of_curves = {curve.label: Line2D([], [], color="black", linestyle=style) for _, curve, _, style, _ in series}
    return of_runs | of_curves if len(panel.curves) > 1 else of_runs


def _draw_alarms(axes: Axes, panel: Panel, runs: list[Run], alarms: Mapping[str, Sequence[Alarm]]) -> None:
    shown = {key for curve in panel.curves for key in curve.keys}
    for run, colour in zip(runs, COLOURS, strict=False):
        for alarm in alarms.get(run.name, ()):
            own = alarm.metric in shown
            axes.axvline(alarm.step, color=colour, linestyle="-" if own else ":", alpha=0.9 if own else 0.55)
            if own:
                top = axes.get_xaxis_transform()
                axes.plot(alarm.step, 1, "v", color=colour, markersize=7, transform=top, clip_on=False)
