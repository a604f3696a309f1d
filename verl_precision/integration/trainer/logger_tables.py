"""Histograms and tables for W&B and TensorBoard; verl passes only numbers to its loggers.

If a logger fails, a line is logged; the run and the other logger continue.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MOST_BINS = 512  # the most that wandb takes

logger = logging.getLogger("verl_precision.mismatch")


def log_histograms(tracking: Any, histograms: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """Hand a step's histograms to those loggers in verl's `Tracking` that take them.

    By name: K + 1 edges (the outermost may be infinite) and K counts. One without counts is not shown.
    """
    for name, histogram in histograms.items():
        edges, counts = _occupied(*(np.asarray(part, dtype=np.float64) for part in histogram))
        if counts.size:
            _show(tracking, HISTOGRAMS, name, *_coarser(edges, counts), step)


def log_table(tracking: Any, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Hand a step's rows of a table to those loggers in verl's `Tracking` that take them.

    Rows are column -> number, text or None; all with the columns of the first. No rows: nothing is logged.
    """
    if rows:
        _show(tracking, TABLES, name, list(rows[0]), [list(row.values()) for row in rows], step)


def _show(tracking: Any, ways: Mapping[str, Callable[..., None]], name: str, *shape: Any) -> None:
    for backend in ways.keys() & tracking.logger.keys():
        try:
            ways[backend](tracking.logger[backend], name, *shape)
        except Exception as error:  # somebody's run is under way, and does not need this picture
            logger.warning("%s could not log %s: %r; training continues without it", backend, name, error)


def _wandb_histogram(wandb: Any, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
    wandb.log({name: wandb.Histogram(np_histogram=(counts, edges))}, step=step)


def _tensorboard_histogram(adapter: Any, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
    centres = (edges[1:] + edges[:-1]) / 2
    moments = {"num": counts.sum(), "sum": (counts * centres).sum(), "sum_squares": (counts * centres**2).sum()}
    numbers = {key: float(value) for key, value in {"min": edges[0], "max": edges[-1], **moments}.items()}
    bins = {"bucket_limits": edges[1:].tolist(), "bucket_counts": counts.tolist()}
    adapter.writer.add_histogram_raw(name, **numbers, **bins, global_step=step)


def _wandb_table(wandb: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    wandb.log({name: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}, step=step)


def _tensorboard_table(adapter: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    adapter.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)


# By verl's name of the logger: (verl's adapter, name, edges or columns, counts or rows, step).
HISTOGRAMS: dict[str, Callable[..., None]] = {"wandb": _wandb_histogram, "tensorboard": _tensorboard_histogram}
TABLES: dict[str, Callable[..., None]] = {"wandb": _wandb_table, "tensorboard": _tensorboard_table}


def _occupied(edges: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut off empty bins at both ends, and end the outermost ones, which have no bound, somewhere."""
    if edges.size > 3:
        edges = np.nan_to_num(edges, neginf=2 * edges[1], posinf=2 * edges[-2])
    used = np.flatnonzero(counts)
    first, end = (used[0], used[-1] + 1) if used.size else (0, 0)
    return edges[first : end + 1], counts[first:end]


def _coarser(edges: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring bins until there are at most `MOST_BINS`."""
    starts = np.arange(0, counts.size, -(-counts.size // MOST_BINS))
    return np.append(edges[starts], edges[-1]), np.add.reduceat(counts, starts)
