"""Reward and mismatch over steps, one line a precision."""

from pathlib import Path

from verl_precision.compare.results import GAP, K3, REWARD

_PANELS = (
    (REWARD, "mean reward", "linear"),
    (GAP, "mean |log-prob gap| (nats)", "log"),
    (K3, "k3 KL(rollout || trainer) (nats)", "log"),
)


def write_figure(path: Path, runs: dict[str, list[dict[str, float]]], title: str) -> None:
    """Write the figure as PNG.

    Args:
        path: the file to write.
        runs: precision -> metrics of each step.
        title: shown above the panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(4.2 * len(_PANELS), 3.4), layout="constrained")
    for axis, (key, label, scale) in zip(axes, _PANELS, strict=True):
        for precision, rows in runs.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=precision)
        axis.set(xlabel="step", title=label, yscale=scale)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
