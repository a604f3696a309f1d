"""Histograms, for the loggers of verl that can show them: wandb and TensorBoard."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The most bins that wandb takes.
WANDB_BINS = 512


def log_histograms(tracking: Any, histograms: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """Hand histograms to those loggers of a run that take them; to the others they are not sent.

    Args:
        tracking: verl's `Tracking`.
        histograms: Name -> (edges, counts), one edge more than counts.
        step: Of training.
    """
    for name, histogram in histograms.items():
        edges, counts = _occupied(*(np.asarray(part, dtype=np.float64) for part in histogram))
        if not counts.size:
            continue
        if "wandb" in tracking.logger:
            import wandb

            shown = wandb.Histogram(np_histogram=_coarser(edges, counts, WANDB_BINS))
            tracking.log(data={name: shown}, step=step, backend=["wandb"])
        if "tensorboard" in tracking.logger:
            centres = (edges[1:] + edges[:-1]) / 2
            tracking.logger["tensorboard"].writer.add_histogram_raw(
                name,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=float(counts.sum()),
                sum=float((counts * centres).sum()),
                sum_squares=float((counts * centres**2).sum()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )


def _occupied(edges: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut off empty bins at both ends, and end the outermost ones, which have no bound, somewhere."""
    if edges.size > 3:
        edges = np.nan_to_num(edges, neginf=2 * edges[1], posinf=2 * edges[-2])
    used = np.flatnonzero(counts)
    if not used.size:
        return edges[:0], counts[:0]
    first, last = used[0], used[-1]
    return edges[first : last + 2], counts[first : last + 1]


def _coarser(edges: np.ndarray, counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring bins until there are at most `most`."""
    group = -(-counts.size // most)
    starts = np.arange(0, counts.size, group)
    return np.append(edges[starts], edges[-1]), np.add.reduceat(counts, starts)
