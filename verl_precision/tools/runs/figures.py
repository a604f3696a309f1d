"""The figure of a comparison: metrics over steps as PNG. The page has its own (page.js), of the same curves."""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from verl_precision.tools.runs.contents import band_of, points_of
from verl_precision.tools.runs.panels import PANELS, REWARD, Panel, colours_of
from verl_precision.tools.runs.read import Run
from verl_precision.tools.runs.standing import Points
from verl_precision.tools.show.colours import GREY
from verl_precision.tools.show.figures import new_figure, style

STYLES = ("-", "--", ":", "-.")  # of curves whose colour comes again, and from the second on of expected ones
MARKED = 60  # points of the longest series in which each has a mark
# Panels of a comparison, of one metric each; with several columns the gap is left out.
COMPARED, COMPARED_IN_COLUMNS = ("reward", "gap", "k3"), ("reward", "k3")
COLUMNS = 4  # beside each other
_WIDTH, _HEIGHT = 4.6, 3.4  # of a panel, in inches
# Of a legend, in inches: a line, an entry without its name, and a letter of the widest font that a browser may take.
_LINE, _ENTRY, _LETTER = 0.2, 0.67, 0.08


def draw_comparison(runs: Sequence[Run], expected: Sequence[Run] = (), panels: Sequence[str] = COMPARED) -> Figure:
    """Draw reward and mismatch over steps, with the expected curves of the reward, which are grey.

    With several columns (`Run.column`), each has a plot of the reward and, below, one of k3, and plots of a metric have
    one scale. Otherwise the panels are beside each other; one that no run has measured is left out. Several runs of one
    arm (seeds) are one curve: their mean, with a shade from the smallest to the largest value; where one of them is not
    finite, the mean has a gap.
    """
    points = {run.name: points_of(run.rows) for run in runs}
    columns = list(dict.fromkeys(run.column for run in runs))
    if len(columns) > 1:
        width = math.ceil(len(columns) / math.ceil(len(columns) / COLUMNS))  # six are twice three
        beside = [columns[start : start + width] for start in range(0, len(columns), width)]
        rows = [[(_PANEL[name], column) for column in some] for some in beside for name in COMPARED_IN_COLUMNS]
    else:
        measured = [name for name in panels if any(_PANEL[name].curve in each for each in points.values())]
        rows, width = [[(_PANEL[name], column) for column in columns for name in measured]], len(measured)
    colours, legend, first = colours_of(runs), dict[str, Line2D](), dict[str, Axes]()
    again = {name: list(colours.values())[:at].count(colour) for at, (name, colour) in enumerate(colours.items())}
    looks = {name: {"color": colours[name], "linestyle": STYLES[times % len(STYLES)]} for name, times in again.items()}
    figure = new_figure(_WIDTH * width, _HEIGHT * len(rows))
    grid = figure.add_gridspec(len(rows), width)
    for panel, column, place in ((*plot, grid[i, j]) for i, row in enumerate(rows) for j, plot in enumerate(row)):
        axes = figure.add_subplot(place, sharey=first.get(panel.name))
        first.setdefault(panel.name, axes)
        own = [run for run in runs if run.column == column]
        legend |= _draw_curves(axes, panel, [(run.curve, points[run.name]) for run in own], looks)
        if panel is REWARD:
            legend |= _draw_expected(axes, [run for run in expected if run.column == column])
        style(axes, panel.axis, panel.unit, f"{column}: {panel.title}" if column else panel.title)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _draw_legend(figure, legend, _WIDTH * width)
    return figure


_PANEL = {panel.name: panel for panel in PANELS}


def _draw_curves(
    axes: Axes, panel: Panel, runs: Sequence[tuple[str, Points]], looks: Mapping[str, dict[str, Any]]
) -> dict[str, Line2D]:
    """Draw a panel's curve of each arm; return the lines by their names."""
    of_arm: dict[str, list[Mapping[int, float]]] = {}
    for name, points in runs:
        if panel.curve in points:
            of_arm.setdefault(name, []).append(points[panel.curve])
    if panel.log and any(value > 0 for seeds in of_arm.values() for each in seeds for value in each.values()):
        axes.set_yscale("log", base=panel.log)  # a shade that begins at zero begins at the frame
    lines = {}
    for name, seeds in of_arm.items():
        steps, means, *limits = band_of(seeds)
        marker = "o" if len(steps) <= MARKED else ""
        lines[name] = axes.plot(steps, means, linewidth=1.6, markersize=2.8, marker=marker, **looks[name])[0]
        if limits:
            axes.fill_between(steps, limits[0], limits[1], color=looks[name]["color"], alpha=0.2, linewidth=0)
    return lines


def _draw_expected(axes: Axes, curves: Sequence[Run]) -> dict[str, Line2D]:
    lines = {}
    for curve, dashes in zip(curves, STYLES[1:], strict=False):
        steps, rewards = zip(*points_of(curve.rows)[REWARD.curve].items(), strict=True)
        lines[curve.name] = axes.plot(steps, rewards, color=GREY, linestyle=dashes, linewidth=1.4, zorder=1)[0]
    return lines


def _draw_legend(figure: Figure, lines: Mapping[str, Line2D], width: float) -> None:
    """Name all curves below the plots, in a figure that grows by it: text takes nothing from plots."""
    texts = [fill(name, int((width - _ENTRY) / _LETTER)) for name in lines]
    parts = [text.split("\n") for text in texts]
    longest = max(len(part) for text in parts for part in text)
    columns = max(1, min(3, int(width / (_ENTRY + _LETTER * longest))))
    figure.legend(lines.values(), texts, loc="outside lower center", ncols=columns, frameon=False)
    height = math.ceil(len(texts) / columns) * max(map(len, parts))
    figure.set_figheight(figure.get_figheight() + _LINE * (height - 1))
