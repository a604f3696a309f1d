"""The loss scaler's state beside verl's shards: one small JSON file, written and read by rank 0 for all ranks.

Every rank has the same scale, so that one file is enough; a state that only some ranks could read would leave them with
different scales.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.errors import CheckpointStateError
from verl_precision.files import write_file

FILE_NAME = "loss_scale.json"

logger = logging.getLogger("verl_precision.engine")


def save_scaler(scaler: LossScaler, folder: str) -> None:
    """Write the scaler's state on rank 0, whole or not at all.

    Args:
        scaler: the scaler; the same state on all ranks.
        folder: the checkpoint's folder; exists.
    """
    if dist.get_rank() == 0:
        write_file(Path(folder) / FILE_NAME, json.dumps(scaler.state_dict()), replace=True)


def load_scaler(scaler: LossScaler, folder: str) -> None:
    """Restore the scaler's state on all ranks; without a state, warn and go on with the scaler as it is.

    Args:
        scaler: continues exactly as the one that was saved.
        folder: the checkpoint's folder.

    Raises:
        CheckpointStateError: on every rank, if the file cannot be understood.
    """
    message: list[Any] = [_read(Path(folder) / FILE_NAME) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0)
    (found,) = message
    if isinstance(found, CheckpointStateError):
        raise found
    if found is None:
        logger.warning(
            "%s: no %s in this checkpoint (written without verl-precision, or by rank 0 elsewhere). The loss scale "
            "starts at %g; a few steps may be skipped until it has adapted.",
            folder,
            FILE_NAME,
            scaler.get_scale(),
        )
        return
    scaler.load_state_dict(found)


def _read(path: Path) -> dict[str, float] | CheckpointStateError | None:
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text())
        return {key: float(state[key]) for key in ("scale", "growth_tracker", "steps_at_minimum")}
    except (ValueError, KeyError, TypeError) as error:
        return CheckpointStateError(
            f"{path} is not a loss-scale state ({type(error).__name__}: {error})",
            allowed="what this package wrote",
            remedy="Restore the file, or delete it to start from loss_scale.initial.",
        )
