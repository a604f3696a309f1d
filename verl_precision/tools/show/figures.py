"""Figures of one look, as PNG files."""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_precision.base.files import new_file

INK = "#7f848b"  # of texts and lines: readable on white and on black, because figures have no ground
rcParams |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, with a layout in which no parts overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def write_png(path: Path, figure: Figure, title: str) -> None:
    """Write a figure with a title; a file that exists is replaced."""
    figure.suptitle(title)
    with new_file(path, replace=True) as scratch:
        figure.savefig(scratch, dpi=150, transparent=True)


def style(axes: Axes, x_label: str = "", y_label: str = "", title: str = "") -> None:
    """Give axes their labels and the common look: a light grid, and a frame only at the bottom."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, pad=12)  # leaves room for a mark above the axes
    axes.grid(color=INK, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
