"""Metrics over steps as PNG figures: those of `verl-precision compare`. The page has its own (page.js)."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, filterfalse, product
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import LineStyleType

from verl_precision.tools.runs.panels import PANELS, REWARD, Panel, colours_of, mean, parts_of, points_of
from verl_precision.tools.runs.read import Run
from verl_precision.tools.show.figures import GREY, new_figure, style

STYLES: tuple[LineStyleType, ...] = ("-", "--", ":", "-.")  # of the curves of a panel
MARKED = 60  # points of the longest series in which each has a mark
# Panels of a comparison; one with several columns, where each has the room of one panel, leaves the gap out.
COMPARED, COMPARED_IN_COLUMNS = ("reward", "gap", "k3"), ("reward", "k3")
COLUMNS = 4  # beside each other
_WIDTH, _HEIGHT = 4.6, 3.4  # of a panel, in inches
# Of a legend, in inches: a line, an entry without its name, and a letter of the widest font that a browser may take.
_LINE, _ENTRY, _LETTER = 0.2, 0.67, 0.08


class Plot(NamedTuple):
    """A panel, drawn for some runs; `expected` are curves of the reward that are not runs."""

    panel: Panel
    runs: Sequence[Run]
    title: str
    expected: Sequence[Run] = ()


def draw_comparison(runs: list[Run], expected: Sequence[Run] = (), panels: Sequence[str] = COMPARED) -> Figure:
    """Draw reward and mismatch over steps, with the curves of the expected reward, each for the runs of its column.

    If the runs have several columns (`Run.column`), each column has a plot of the reward and, below, one of k3. All
    plots of a metric have one scale. Otherwise the panels are beside each other, again for every eight curves: there
    are no more colours. A panel that no run has measured is left out.
    """
    of_name = {panel.name: panel for panel in PANELS}
    columns = list(dict.fromkeys(run.column for run in runs))

    def plot_of(panel: Panel, column: str) -> Plot:
        own, own_expected = ([run for run in some if run.column == column] for some in (runs, expected))
        return Plot(panel, own, f"{column}: {panel.title}", own_expected)

    if len(columns) > 1:
        width = math.ceil(len(columns) / math.ceil(len(columns) / COLUMNS))  # six are twice three
        beside = [columns[start : start + width] for start in range(0, len(columns), width)]
        rows = [[plot_of(of_name[name], each) for each in some] for some in beside for name in COMPARED_IN_COLUMNS]
        parts = [rows]
    else:
        of_panel = {name: list(product(runs, of_name[name].metrics.values())) for name in panels}
        chosen = [of_name[name] for name, pairs in of_panel.items() if any(points_of(*pair) for pair in pairs)]
        parts = [[[Plot(panel, part, panel.title, expected) for panel in chosen]] for part in parts_of(runs)]
    figure = draw(parts)
    # All plots with the same unit, on the same kind of axis, have the smallest and the largest of their limits.
    for kind in {(each.get_ylabel(), each.get_yscale()) for each in figure.axes} if len(columns) > 1 else ():
        alike = [each for each in figure.axes if (each.get_ylabel(), each.get_yscale()) == kind]
        lows, highs = zip(*(each.get_ylim() for each in alike), strict=True)
        for each in alike:
            each.set_ylim(min(lows), max(highs))
    return figure


def draw(parts: Sequence[Sequence[Sequence[Plot]]]) -> Figure:
    """Draw parts below each other, rows of plots with a legend each: colour tells runs apart, line style the curves.

    Several runs of one arm (seeds) are one curve: at each step the mean over those that have measured it, with a shade
    from the smallest to the largest value. Where one of them is not finite, the mean has a gap. On a logarithmic axis
    the shade is of the positive values. Curves of zeros, which hide each other or are not on the axis, are named below
    it. Expected curves of the reward are grey, each with a line style of its own.
    """
    figure = new_figure(_WIDTH * max(len(row) for part in parts for row in part), _HEIGHT * sum(map(len, parts)))
    places = figure.subfigures(len(parts), 1, squeeze=False)[:, 0] if len(parts) > 1 else [figure]
    lines = [_draw_plots(place, part) for place, part in zip(places, parts, strict=True)]
    figure.set_figheight(figure.get_figheight() + _LINE * (sum(lines) - len(lines)))  # text takes nothing from plots
    return figure


def _draw_plots(figure: FigureBase, rows: Sequence[Sequence[Plot]]) -> int:
    """Draw rows of plots with one legend; return its lines and those about zeros. A name has one colour in all."""
    colours = colours_of([run for row in rows for plot in row for run in plot.runs])
    legend: dict[str, Line2D] = {}
    below = 0
    grid = figure.add_gridspec(len(rows), max(map(len, rows)))
    for plot, place in ((plot, grid[i, j]) for i, row in enumerate(rows) for j, plot in enumerate(row)):
        axes, panel = figure.add_subplot(place), plot.panel
        names, zeros = _draw_curves(axes, plot, colours)
        legend |= names
        below = max(below, len(zeros.splitlines()))
        for run, dashes in zip(plot.expected if panel is REWARD else (), STYLES[1:], strict=False):
            steps, rewards = zip(*points_of(run, REWARD.metrics["reward"]).items(), strict=True)
            legend[run.name] = axes.plot(steps, rewards, color=GREY, linestyle=dashes, linewidth=1.4, zorder=1)[0]
        style(axes, "\n".join(filter(None, (panel.axis, zeros))), panel.unit, plot.title)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    width = _WIDTH * max(map(len, rows))
    texts = [fill(name, int((width - _ENTRY) / _LETTER)) for name in legend]
    parts = [text.split("\n") for text in texts]
    longest = max(len(part) for lines in parts for part in lines)
    columns = max(1, min(3, int(width / (_ENTRY + _LETTER * longest))))
    figure.legend(legend.values(), texts, loc="outside lower center", ncols=columns, frameon=False)
    return below + math.ceil(len(texts) / columns) * max(map(len, parts))


def _draw_curves(axes: Axes, plot: Plot, colours: Mapping[str, str]) -> tuple[dict[str, Line2D], str]:
    """Draw every curve; return what the legend says of runs and, where there are several, of curves; and of zeros."""
    panel = plot.panel
    series: list[tuple[str, str, LineStyleType, dict[int, list[float]]]] = []  # the last: values of all seeds, by step
    for name in dict.fromkeys(run.curve for run in plot.runs):
        for (label, metric), dashes in zip(panel.metrics.items(), STYLES, strict=False):
            seeds = [points_of(run, metric) for run in plot.runs if run.curve == name]
            if steps := sorted({step for points in seeds for step in points}):
                values = {step: [points[step] for points in seeds if step in points] for step in steps}
                series.append((name, label, dashes, values))
    log = bool(panel.log) and any(each > 0 for *_, values in series for seeds in values.values() for each in seeds)

    def shown(value: float) -> float:
        return value if math.isfinite(value) and (value > 0 or not log) else math.nan

    lines: list[Line2D] = []
    for name, _, dashes, values in series:
        steps, marker = list(values), "o" if len(values) <= MARKED else ""
        means = [shown(mean(seeds)) if all(map(math.isfinite, seeds)) else math.nan for seeds in values.values()]
        look: dict[str, Any] = {"color": colours[name], "linestyle": dashes, "marker": marker}
        lines += axes.plot(steps, means, linewidth=1.6, markersize=2.8, **look)
        if max(map(len, values.values())) > 1:
            finite = [[*filterfalse(math.isnan, map(shown, seeds))] or [math.nan] for seeds in values.values()]
            lows, highs = list(map(min, finite)), list(map(max, finite))
            axes.fill_between(steps, lows, highs, color=colours[name], alpha=0.2, linewidth=0)
    if log:
        axes.set_yscale("log", base=panel.log)
    elif axes.dataLim.y0 == 0:  # counts and fractions stand on the axis
        axes.set_ylim(0, None if axes.dataLim.y1 > 0 else 1)
        for line in lines:  # zeros are not below the frame
            line.set(clip_on=False, zorder=3)
    of_runs = {name: Line2D([], [], color=colours[name], linewidth=3) for name, *_ in series}
    of_curves = {label: Line2D([], [], color="black", linestyle=dashes) for _, label, dashes, _ in series}
    several = len(panel.metrics) > 1
    flat = {f"{name} {label}" if several else name: [*chain(*seeds.values())] for name, label, _, seeds in series}
    hidden = [name for name, all_ in flat.items() if all(value == 0 or (log and value < 0) for value in all_)]
    zero = "0" if not any(chain(*(flat[name] for name in hidden))) else "0 or less"
    who = "all" if len(hidden) == len(flat) > 1 else ", ".join(hidden)
    zeros = f"{zero} at every {panel.axis}: {who}" if hidden else ""
    names = of_runs | of_curves if several else of_runs
    return names, fill(zeros, int(_WIDTH / _LETTER), break_on_hyphens=False)
