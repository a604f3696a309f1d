"""Figures: tokens against the diagonal, their distance from it, sequences by length, the grid of dtypes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from verl_precision.files import new_file
from verl_precision.offline_mismatch.measure import Pair
from verl_precision.offline_mismatch.table import ranked

_POINTS: dict[str, Any] = {"s": 3, "alpha": 0.25, "linewidths": 0, "rasterized": True}
_LINE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.8, "zorder": 0.5}
_COLOURS = {"same": "tab:blue", "mixed": "tab:orange"}


def write_figures(folder: Path, pairs: list[Pair], title: str) -> list[Path]:
    """Write the four figures as PNG.

    Args:
        folder: Folder of the figures; figures of the same names are replaced.
        pairs: Every rollout dtype with every train dtype.
        title: Title of each figure.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    written = []
    for name, draw in (
        ("tokens.png", _draw_tokens),
        ("token_gaps.png", _draw_gaps),
        ("sequences.png", _draw_sequences),
        ("grid.png", _draw_grid),
    ):
        figure = draw(pairs, title)
        with new_file(folder / name, replace=True) as scratch:
            figure.savefig(scratch, dpi=130)
        matplotlib.pyplot.close(figure)
        written.append(folder / name)
    return written


def _label(dtype: str) -> str:
    return dtype.upper()


def _dtypes(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(p.rollout for p in pairs)), list(dict.fromkeys(p.train for p in pairs))


def _panels(pairs: list[Pair], title: str, labels: tuple[str, str], draw: Callable[[Any, Pair], None]) -> Any:
    """One panel a pair, a row a rollout dtype, a column a train dtype, all on the same axes."""
    from matplotlib import pyplot

    rollouts, trains = _dtypes(pairs)
    size = (3.1 * len(trains) + 0.6, 2.7 * len(rollouts) + 0.7)
    figure, axes = pyplot.subplots(
        len(rollouts), len(trains), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for pair in pairs:
        row, column = rollouts.index(pair.rollout), trains.index(pair.train)
        axis = axes[row][column]
        axis.grid(alpha=0.25)
        draw(axis, pair)
        axis.set_title(f"rollout {_label(pair.rollout)}, train {_label(pair.train)}", fontsize=10)
        if row == len(rollouts) - 1:
            axis.set_xlabel(labels[0])
        if column == 0:
            axis.set_ylabel(labels[1])
    figure.suptitle(title)
    return figure


def _colour(pair: Pair) -> str:
    return _COLOURS["same" if pair.rollout == pair.train else "mixed"]


def _note(axis: Any, text: str) -> None:
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axis.text(0.04, 0.96, text, transform=axis.transAxes, va="top", fontsize=9, bbox=box)


def _draw_tokens(pairs: list[Pair], title: str) -> Any:
    finite = [pair.probs[np.isfinite(pair.probs) & (pair.probs > 0)] for pair in pairs]
    lowest, highest, scale = _axis(np.concatenate(finite))

    def draw(axis: Any, pair: Pair) -> None:
        axis.plot([lowest, highest], [lowest, highest], **_LINE)
        axis.scatter(pair.probs[1], pair.probs[0], color=_colour(pair), **_POINTS)
        axis.set(xscale=scale, yscale=scale, aspect="equal")
        pearson = pair.metrics.get("mismatch/probs_pearson", math.nan)
        _note(axis, f"k3 {pair.k3:.1e}\n1 - Pearson {1 - pearson:.1e}")

    return _panels(pairs, title, ("rollout's probability", "trainer's probability"), draw)


def _draw_gaps(pairs: list[Pair], title: str) -> Any:
    finite = [pair.probs[1][np.isfinite(pair.probs[1]) & (pair.probs[1] > 0)] for pair in pairs]
    scale = _axis(np.concatenate(finite))[2]

    def draw(axis: Any, pair: Pair) -> None:
        axis.axhline(0, **_LINE)
        axis.scatter(pair.probs[1], pair.gaps, color=_colour(pair), **_POINTS)
        axis.set(xscale=scale)
        mean = pair.metrics.get("mismatch/log_prob_gap_abs_mean", math.nan)
        _note(axis, f"mean abs {mean:.1e}")

    return _panels(pairs, title, ("rollout's probability", "log-prob gap of a token (nats)"), draw)


def _draw_sequences(pairs: list[Pair], title: str) -> Any:
    def draw(axis: Any, pair: Pair) -> None:
        axis.axhline(0, **_LINE)
        axis.scatter(pair.lengths, pair.sequence_log_ratios, color=_colour(pair), **{**_POINTS, "s": 9, "alpha": 0.5})
        spread = pair.metrics.get("mismatch/sequence_log_ratio_std", math.nan)
        _note(axis, f"std {spread:.1e}")

    return _panels(pairs, title, ("response length (tokens)", "log ratio of a response (nats)"), draw)


def _draw_grid(pairs: list[Pair], title: str) -> Any:
    from matplotlib import pyplot

    rollouts, trains = _dtypes(pairs)
    ranks = {(pair.rollout, pair.train): rank for rank, pair in enumerate(ranked(pairs), 1)}
    # k3 may be exactly 0 where both engines agree
    exponents = np.full((len(rollouts), len(trains)), np.nan)
    for pair in pairs:
        if pair.k3 > 0:
            exponents[rollouts.index(pair.rollout), trains.index(pair.train)] = math.log10(pair.k3)
    figure, axis = pyplot.subplots(figsize=(1.9 * len(trains) + 2.0, 1.4 * len(rollouts) + 1.3), layout="constrained")
    image = axis.imshow(exponents, cmap="YlOrRd", aspect="auto")
    for pair in pairs:
        row, column = rollouts.index(pair.rollout), trains.index(pair.train)
        dark = float(np.ma.filled(image.norm(exponents[row, column]), 0.0)) > 0.6
        axis.text(
            *(column, row, f"{pair.k3:.1e}\nrank {ranks[pair.rollout, pair.train]}"),
            ha="center", va="center", color="white" if dark else "black",
        )  # fmt: skip
    axis.set(xlabel="train dtype", ylabel="rollout dtype", title=f"k3 KL per token (nats)\n{title}")
    axis.set_xticks(range(len(trains)), map(_label, trains))
    axis.set_yticks(range(len(rollouts)), map(_label, rollouts))
    figure.colorbar(image, label="log10 k3")
    return figure


def _axis(probs: np.ndarray) -> tuple[float, float, str]:
    """Return smallest and largest probability, and the scale that shows what lies between."""
    if not probs.size:
        return 0.0, 1.0, "linear"
    lowest, highest = float(probs.min()), float(probs.max())
    return lowest, highest, "log" if highest > 10 * lowest else "linear"
