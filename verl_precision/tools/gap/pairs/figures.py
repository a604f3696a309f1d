"""Figures: tokens against the diagonal, their distance from it, and sequences by length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_precision.tools.gap.pairs.measure import Pair
from verl_precision.tools.show.colours import COLOURS
from verl_precision.tools.show.figures import INK, new_figure, style, write_png

_TOKENS: dict[str, Any] = {"s": 3, "alpha": 0.25, "linewidths": 0, "rasterized": True}
_RESPONSES: dict[str, Any] = {**_TOKENS, "s": 9, "alpha": 0.5}
_LINE: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 0.8, "zorder": 0.5}


def write_figures(folder: Path, pairs: list[Pair], title: str) -> list[str]:
    """Write the figures as PNG, and return their names; `pairs` has every pair of dtypes, rollout by rollout."""
    x_label, probs = "rollout's probability", np.concatenate([pair.probs.ravel() for pair in pairs])
    shown = probs[np.isfinite(probs) & (probs > 0)]
    scale = "log" if shown.size and shown.max() > 10 * shown.min() else "linear"

    def tokens(axis: Axes, pair: Pair, colour: str) -> str:
        axis.set(xscale=scale, yscale=scale, aspect="equal")
        axis.axline((0.1, 0.1), (1, 1), **_LINE)
        axis.scatter(pair.probs[1], pair.probs[0], color=colour, **_TOKENS)
        return f"k3 {pair.k3:.1e}\n1 - Pearson {1 - pair.metric('probs_pearson'):.1e}"

    def token_gaps(axis: Axes, pair: Pair, colour: str) -> str:
        axis.set(xscale=scale)
        axis.axhline(0, **_LINE)
        axis.scatter(pair.probs[1], pair.gaps, color=colour, **_TOKENS)
        return f"mean abs {pair.metric('log_prob_gap_abs_mean'):.1e}"

    def sequences(axis: Axes, pair: Pair, colour: str) -> str:
        axis.axhline(0, **_LINE)
        axis.scatter(pair.lengths, pair.sequence_log_ratios, color=colour, **_RESPONSES)
        for side in (-1, 1):
            axis.plot([*pair.growth], [side * std for _, std in pair.growth.values()], color=INK, linewidth=0.8)
        return f"std {pair.metric('sequence_log_ratio_std'):.1e}"

    figures = {
        "tokens.png": _panels(pairs, x_label, "trainer's probability", tokens),
        "token_gaps.png": _panels(pairs, x_label, "log-prob gap of a token (nats)", token_gaps),
        "sequences.png": _panels(pairs, "response length (tokens)", "log ratio of a response (nats)", sequences),
    }
    for name, figure in figures.items():
        write_png(folder / name, figure, title)
    return list(figures)


def _panels(pairs: list[Pair], x_label: str, y_label: str, draw: Callable[[Axes, Pair, str], str]) -> Figure:
    """Draw a panel for each pair, one row for each rollout dtype; `draw` returns the note in the corner."""
    rows, columns = len({pair.rollout for pair in pairs}), len({pair.train for pair in pairs})
    figure = new_figure(3.1 * columns + 0.6, 2.7 * rows + 0.7)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, pair in zip(axes.flat, pairs, strict=True):
        note = draw(axis, pair, COLOURS[pair.rollout != pair.train])
        axis.text(0.04, 0.96, note, transform=axis.transAxes, va="top", fontsize=9)
        style(axis, title=f"rollout {pair.rollout.upper()}, train {pair.train.upper()}")
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure
