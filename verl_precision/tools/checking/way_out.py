"""The way out where words of a command win over its presets: which to leave out, and the whole command without them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_precision.check.winning_words import WinningWord


@dataclass(frozen=True)
class WayOut:
    """What to type in place of a command."""

    leave_out: list[str]
    command: str  # for a shell, without them


def way_out(
    winning: Sequence[WinningWord], path: Path, overrides: Sequence[str], typed: Sequence[str]
) -> WayOut | None:
    """Return it; None where presets and words agree.

    `typed` is what `check` was given, of which `path` and `overrides` were read: a command, a recipe, overrides alone.
    """
    words = list(dict.fromkeys(each.word for each in winning if each.contradicts))
    if not words:
        return None
    front = []
    if list(typed) == list(overrides):
        front = ["python", "-m", "verl.trainer.main_ppo"]
    elif not typed or (list(typed[1:]) == list(overrides) and Path(typed[0]) == path):
        front = ["python", "-m", "verl.trainer.main_ppo", "--config-dir", str(path.parent), "--config-name", path.stem]
    command = [*front, *(each for each in (overrides if front else typed) if each not in words)]
    return WayOut(words, shlex.join(command))
