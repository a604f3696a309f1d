"""The folder of a comparison: a new one, or that of the same command which was interrupted.

`comparison.json` says which command a folder belongs to, and `base/owner.py` locks the folder while that command runs.
A comparison is finished when its `summary.json` has every run.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.base.owner import release, take
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.tools.runs.compare.grid import PlannedRun, recipe_folders, run_name
from verl_precision.tools.show.tables import write_json

COMMAND, SUMMARY = "comparison.json", "summary.json"
_REMEDY = "Move it away: runs that it has are then made again."

logger = logging.getLogger("verl_precision.compare")


def command_of(recipe: Path, runs: Sequence[PlannedRun], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what makes a comparison the same: recipe and its text, runs, settings, and the versions that run it."""
    # The recipes beside it, too: it may build on them.
    files = [file for folder in recipe_folders(recipe) for file in sorted(folder.glob("*.yaml"))]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    of_runs = {"runs": {run.name: list(run.overrides) for run in runs}, "overrides": list(overrides)}
    return {"recipe": str(recipe.resolve()), "digest": digest, **of_runs, "versions": installed_versions()}


@contextmanager
def comparison_folder(parent: Path, command: dict[str, Any], anew: bool = False) -> Iterator[Path]:
    """Yield the folder of an interrupted comparison with the same command, or else a new one; it is locked meanwhile.

    With `anew`, interrupted ones are left alone. Two comparisons in one second are refused.
    """
    for path in () if anew else sorted(parent.glob(f"*/{COMMAND}"), reverse=True):
        if _interrupted(path, command) and take(path.parent) is None:
            try:
                if _interrupted(path, command):  # still, now that nobody else is at work in it
                    yield path.parent
                    return
            finally:
                release(path.parent)
    path = parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S") / COMMAND
    if path.parent.exists() or take(path.parent) is not None:
        remedy = "Wait a second, or give another --output."
        raise ConfigurationError(f"{path.parent} exists, and nothing is overwritten", remedy=remedy)
    try:
        write_json(path, command, replace=False)
        yield path.parent
    finally:
        release(path.parent)


def _interrupted(path: Path, command: dict[str, Any]) -> bool:
    try:
        recorded = read_state(path, dict[str, Any], _REMEDY)
    except CheckpointStateError as error:  # whose folder it is, nobody knows
        logger.warning("a comparison is passed over: %s", error)
        return False
    return recorded == command and not seconds_of_runs(path.parent).keys() >= command["runs"].keys()


def seconds_of_runs(folder: Path) -> dict[str, float]:
    """Return the seconds of each run that a comparison has finished, by its name."""
    return read_state(folder / SUMMARY, _seconds, _REMEDY) or {}


def _seconds(summary: Any) -> dict[str, float]:
    return {run_name(run["arm"], run["seed"]): checked(float, run["seconds_total"]) for run in summary["runs"]}
