"""Tables for W&B and TensorBoard: verl hands its loggers numbers alone.

A logger that fails costs a line in the log, and neither the run nor the other logger.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger("verl_precision.mismatch")


def log_table(tracking: Any, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Hand a step's rows of a table to those loggers in verl's `Tracking` that take them.

    Rows are column -> number, text or None; all with the columns of the first. No rows: nothing is logged.
    """
    for backend in TABLES.keys() & tracking.logger.keys() if rows else ():
        try:
            TABLES[backend](tracking.logger[backend], name, list(rows[0]), [list(row.values()) for row in rows], step)
        except Exception as error:  # somebody's run is under way, and does not need this table
            logger.warning("%s could not show %s: %r; training goes on, without it", backend, name, error)


def _wandb_table(wandb: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    wandb.log({name: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}, step=step)


def _tensorboard_table(adapter: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    adapter.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)


# By verl's name of the logger.
TABLES: dict[str, Callable[..., None]] = {"wandb": _wandb_table, "tensorboard": _tensorboard_table}
