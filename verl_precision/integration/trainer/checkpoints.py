"""Checkpoints of earlier starts: which are complete, which one a run resumes from, and which may be deleted.

verl resumes from the checkpoint in `latest_checkpointed_iteration.txt`. A killed run leaves this file empty or old. If
it is missing, or names a missing folder, verl begins from scratch. verl never removes checkpoints of earlier starts.

A checkpoint is complete when verl has written all of it: for each role (actor, critic) a file of each rank for each
content that is loaded, then `data.pt`. Each file is a ZIP archive of `torch.save`, with a directory at its end: half a
file has none. In asynchronous modes the folder `transfer_queue`, with the prompts under way, follows; it appears whole.
A checkpoint whose folder has a file `KEEP` is not deleted.
"""

import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.files import write_file
from verl_precision.base.loggers import general as logger
from verl_precision.base.state import read_state
from verl_precision.base.verl_config import FSDP, engines

LAST_FILE, QUEUE = "data.pt", "transfer_queue"
TRACKER = "latest_checkpointed_iteration.txt"
MARK = "KEEP"
RESCUE_FILE = "rescue.yaml"  # in the folder of a run that was rescued, and in that of its rescue
STEP = re.compile(r"global_step_(0|[1-9][0-9]*)\Z")
_SHOWN = 80  # characters of a tracker; a step has fewer
_SHARD = re.compile(r"(\w+)_world_size_(\d+)_rank_(\d+)\.pt$")
_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}  # of `checkpoint.load_contents`


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return a run's checkpoints by their steps, in their order."""
    found = {int(name[1]): path for path in folder.glob("global_step_*") if (name := STEP.match(path.name))}
    return dict(sorted(found.items()))


def keep_checkpoint_before(step: int, folder: Path) -> None:
    """Mark a folder's newest checkpoint before a step; if all checkpoints are later, mark the oldest."""
    if not (found := checkpoints_in(folder)):
        return
    checkpoint = found[max((number for number in found if number < step), default=min(found))]
    if not (mark := checkpoint / MARK).exists():
        words = f"An alarm's evidence began at step {step}. This file keeps the checkpoint from deletion.\n"
        write_file(mark, words)
        logger.warning("%s is kept: it is the last checkpoint before the alarm's evidence began", checkpoint)


def is_complete(checkpoint: Path, contents: Iterable[str] = tuple(_FILES), roles: Iterable[str] = ("actor",)) -> bool:
    """Return whether verl has written all of a checkpoint of its FSDP engines, and has removed no part."""
    wanted = {_FILES[content] for content in contents if content in _FILES}
    return zipfile.is_zipfile(checkpoint / LAST_FILE) and all(wanted <= _whole(checkpoint / role) for role in roles)


def _whole(folder: Path) -> set[str]:
    """Return the contents for which a role's folder has a readable file of every rank."""
    ranks = defaultdict(set)
    for file in folder.glob("*_rank_*.pt"):
        if (name := _SHARD.match(file.name)) and zipfile.is_zipfile(file):
            ranks[name[1], int(name[2])].add(int(name[3]))
    return {content for (content, world), found in ranks.items() if found == set(range(world))}


def mend_tracker(config: DictConfig) -> None:
    """If verl's tracker names no complete checkpoint, make verl resume from the newest complete one, and log it.

    Without a tracker and a complete checkpoint, a run begins from scratch, with a warning about incomplete ones. With a
    tracker alone the run is refused. A run that does not resume by the tracker, or has no FSDP engine, is not changed.
    """
    actor, folder = config.actor_rollout_ref.actor, Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode != "auto" or actor.strategy not in FSDP:
        return
    found, tracker = checkpoints_in(folder), folder / TRACKER
    roles = [engine.role for engine in engines(config) if engine.trains]
    way_out = "Remove this file; the run then finds the newest complete checkpoint by itself."
    said = read_state(tracker, lambda text: text.strip()[:_SHOWN], way_out)
    complete = [step for step, path in found.items() if is_complete(path, actor.checkpoint.load_contents, roles)]
    if said and said in map(str, complete):
        return
    if config.trainer.v1.trainer_mode not in ("sync", "vp_sync"):  # verl does not report a missing queue
        complete = [step for step in complete if (found[step] / QUEUE).is_dir()]
    half = ", ".join(path.name for step, path in found.items() if step not in complete) or "none"
    if complete:
        logger.warning(
            "%s %s. The run resumes from the newest complete checkpoint, global_step_%d (not complete: %s)",
            tracker, "is not there" if said is None else f"says {said!r}", complete[-1], half,
        )  # fmt: skip
        write_file(tracker, str(complete[-1]), replace=True)
    elif said is not None:
        raise CheckpointStateError(
            f"{tracker} says {said!r}, and no checkpoint in that folder is complete (not complete: {half})",
            setting="trainer.default_local_dir",
            value=str(folder),
            allowed="a folder with a complete checkpoint, or without any",
            remedy="Restore the checkpoint. To begin from scratch, add trainer.resume_mode=disable.",
        )
    elif found:
        logger.warning("%s: no checkpoint is complete (%s), and the run begins from scratch", folder, half)


def adopt_earlier(checkpoint_manager: Any, local_path: str, keep: int | None) -> None:
    """Add the checkpoints of earlier starts to verl's checkpoint manager, which removes them in its usual order.

    Incomplete ones go first; those with a file `KEEP` stay. With `keep=1` verl removes the checkpoints that it knows as
    soon as the new shards exist. So the first save does not add the newest complete one, from which a run would resume.
    """
    new = Path(local_path).absolute()
    if not keep or not (name := STEP.match(new.parent.name)):
        return
    known = [path for path in checkpoint_manager.previous_saved_paths if not (Path(path).parent / MARK).exists()]
    remembered = {Path(path).absolute() for path in known}
    earlier = [path for step, path in checkpoints_in(new.parent.parent).items() if step < int(name[1])]
    there = [path for path in earlier if (path / new.name).is_dir() and not (path / MARK).exists()]
    forgotten = [path for path in there if path / new.name not in remembered]
    whole = [p for p in forgotten if is_complete(p, checkpoint_manager.checkpoint_load_contents, (new.name,))]
    half = [path for path in forgotten if path not in whole]
    if keep == 1 and not known:
        whole = whole[:-1]
    if half or whole:
        logger.info("earlier checkpoints among the %d to keep: %s", keep, [p.name for p in half + whole])
    checkpoint_manager.previous_saved_paths = [*(str(path / new.name) for path in half + whole), *known]
