"""Checkpoints that verl must not remove: the last one before the trouble began, and whatever a user marks.

verl keeps the newest `trainer.max_actor_ckpt_to_keep` checkpoints. When somebody reads an alarm, those may all be from
after the reward fell. A file `KEEP` in a checkpoint's folder spares it.
"""

import re
from pathlib import Path
from typing import Any

from verl_precision.base.files import write_file

MARK = "KEEP"
_STEP = re.compile(r"global_step_(\d+)$")


def keep_checkpoint_before(step: int, folder: Path) -> Path | None:
    """Mark the newest checkpoint before a step; if all are later, the oldest.

    Args:
        step: Of training, with which the trouble began.
        folder: Of the run's checkpoints.

    Returns:
        The checkpoint that is marked now, or None where there is none or it was marked before.
    """
    found = {int(name.group(1)): path for path in folder.glob("global_step_*") if (name := _STEP.match(path.name))}
    if not found:
        return None
    checkpoint = found[max((number for number in found if number < step), default=min(found))]
    mark = checkpoint / MARK
    if mark.exists():
        return None
    write_file(mark, f"An alarm has its evidence from step {step} on. This checkpoint stays while this file is here.\n")
    return checkpoint


def spare_marked(checkpoint_manager: Any) -> None:
    """Have verl's checkpoint manager forget the checkpoints that are marked: it removes only what it remembers."""
    paths = checkpoint_manager.previous_saved_paths
    checkpoint_manager.previous_saved_paths = [path for path in paths if not (Path(path).parent / MARK).exists()]
