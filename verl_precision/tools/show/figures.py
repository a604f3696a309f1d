"""Figures of one look."""

from matplotlib.axes import Axes


def style(axes: Axes, x_label: str = "", y_label: str = "", title: str = "", grid: bool = True) -> None:
    """Give axes their labels and the look of all: a light grid, and a frame at the bottom alone."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, pad=12)  # leaves room for a mark above the axes
    if grid:
        axes.grid(color="#e4e5e7", linewidth=0.7)
        axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
