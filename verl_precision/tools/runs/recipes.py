"""The recipes that travel with the package, and the locks, written where a user can run and edit them."""

import shutil
from pathlib import Path

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder, shipped_folder


def write_recipes(folder: Path) -> Path:
    """Write `recipes/`, with the locks, into a folder, which is created; return its path, refuse an old one."""
    target = folder / "recipes"
    if target.exists():
        problem, allowed = "it exists; nothing was written", "a folder without recipes/, or a new one"
        remedy = "Name another folder, or move yours away."
        raise ConfigurationError(problem, setting="FOLDER", value=str(target), allowed=allowed, remedy=remedy)
    with new_folder(target) as scratch:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(shipped_folder("recipes"), scratch, ignore=ignore, dirs_exist_ok=True)
        for lock in shipped_folder("requirements").glob("*.lock"):
            shutil.copy(lock, scratch)
    return target
