"""The figure of a comparison: the page's curves of reward and mismatch, as PNG."""

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_precision.tools.runs.curves import PANELS, Panel
from verl_precision.tools.show.figures import new_figure, style

STYLES = ("-", "--", ":", "-.")  # of curves that share a colour
COMPARED = ("reward", "gap", "k3", "phantom")  # panels; each is drawn if a run has measured it
_MARKED = 60  # most points of a series whose points have marks
_WIDTH, _HEIGHT, _LINE, _NAMES = 4.6, 3.4, 0.2, 3  # inches of a panel, and of a legend line; names in this line


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
