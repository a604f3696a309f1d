"""The figure of a comparison: the page's curves of reward and mismatch, as PNG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_precision.tools.runs.curves import PANELS, Panel
from verl_precision.tools.show.colours import GREY
from verl_precision.tools.show.figures import new_figure, style

STYLES = ("-", "--", ":", "-.")  # of curves whose colour comes again, and from the second on of expected ones
COMPARED = ("reward", "gap", "k3", "phantom")  # panels, of which those are drawn that a run has measured
_MARKED = 60  # points of the longest series in which each has a mark
_WIDTH, _HEIGHT, _LINE, _NAMES = 4.6, 3.4, 0.2, 3  # of a panel, and of a line of the legend, in inches; names in it


def draw_comparison(content: Mapping[str, Any]) -> Figure:
    """Draw a curve for each arm over steps, given what the page shows, with the expected curves of the reward in grey.

    Several runs of one arm (seeds) are one curve: their mean, with a shade from the smallest to the largest value.
    """
    curves = content["curves"]
    panels = [
        panel for panel in PANELS if panel.name in COMPARED and any(panel.curve in each for each in curves.values())
    ]
    names = math.ceil((len(curves) + len(content["expected"])) / _NAMES)
    figure = new_figure(_WIDTH * len(panels), _HEIGHT + _LINE * names)
    plots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(plots, panels, strict=True):
        if panel is PANELS[0]:
            for curve, dashes in zip(content["expected"], STYLES[1:], strict=False):
                _draw(axes, curve["points"], color=GREY, linestyle=dashes, label=curve["name"], zorder=1)
        _draw_arms(axes, panel, content)
        style(axes, panel.axis, panel.unit, panel.title)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    lines = {line.get_label(): line for axes in plots for line in axes.get_lines()}
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=_NAMES, frameon=False)
    return figure


def _draw_arms(axes: Axes, panel: Panel, content: Mapping[str, Any]) -> None:
    drawn, positive = list[str](), False
    for name, colour in {run["curve"]: run["colour"] for run in content["runs"]}.items():
        if series := content["curves"][name].get(panel.curve):
            _draw(axes, series, color=colour, linestyle=STYLES[drawn.count(colour) % len(STYLES)], label=name)
            positive |= any(float(value) > 0 for value in series[1])
        drawn.append(colour)
    if panel.log and positive:
        axes.set_yscale("log", base=panel.log)  # a shade that begins at zero begins at the frame


def _draw(axes: Axes, series: Sequence[Sequence[Any]], **look: Any) -> None:
    steps, means, *limits = ([float(value) for value in row] for row in series)
    axes.plot(steps, means, linewidth=1.6, markersize=2.8, marker="o" if len(steps) <= _MARKED else "", **look)
    if limits:
        axes.fill_between(steps, limits[0], limits[1], color=look["color"], alpha=0.2, linewidth=0)
