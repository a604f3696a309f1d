"""New contents put in place of old ones, all or nothing, whenever the process dies.

Everything is written beside the tree's files first, into one folder. Its journal, written last and in one go, is the
point of no return: without it the next call throws the folder away, and the tree is as it was; with it the next call
finishes the renames. A file changes by one rename, so it is never half-written.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl_precision.errors import PatchError
from verl_precision.patching.series import sha256

FOLDER = ".verl-precision-patch"
_JOURNAL = "journal.json"


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the tree against other calls; the system lets go when the process ends, however it ends.

    Raises:
        PatchError: if another process holds it.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"TREE={root}: another verl-precision patch is at work on it. Wait for it.") from None
        yield
    finally:
        os.close(descriptor)


def interrupted(root: Path) -> bool:
    """Say whether an earlier call died after its point of no return, so that files may be old or new."""
    return (root / FOLDER / _JOURNAL).is_file()


def recover(root: Path) -> bool:
    """Finish, or forget, what an earlier call began.

    Args:
        root: of the tree.

    Returns:
        Whether files were put in place.

    Raises:
        PatchError: if one of them has been changed by somebody else since.
    """
    if interrupted(root):
        _finish(root)
        return True
    if (root / FOLDER).is_dir():
        shutil.rmtree(root / FOLDER)
    return False


def replace_all(root: Path, new: Mapping[str, bytes | None]) -> None:
    """Put new contents in place of every file.

    Args:
        root: of the tree; every path lies within it.
        new: bytes by path relative to `root`; None removes the file, and folders that this leaves empty.
    """
    staging = root / FOLDER
    staging.mkdir()
    try:
        _stage(root, staging, new)
    except BaseException:  # no space, Ctrl-C: nothing has been replaced yet
        shutil.rmtree(staging)
        raise
    _finish(root)


def _stage(root: Path, staging: Path, new: Mapping[str, bytes | None]) -> None:
    journal = {}
    for number, (path, content) in enumerate(sorted(new.items())):
        entry: dict[str, str | None] = {"before": sha256(root / path), "after": None, "staged": None}
        if content is not None:
            staged = staging / str(number)
            _write(staged, content)
            if (root / path).exists():
                shutil.copymode(root / path, staged)
            entry |= {"after": sha256(staged), "staged": staged.name}
        journal[path] = entry
    _write(staging / "journal.new", json.dumps(journal).encode())
    os.replace(staging / "journal.new", staging / _JOURNAL)
    _sync_folder(staging)


def _finish(root: Path) -> None:
    staging = root / FOLDER
    journal = json.loads((staging / _JOURNAL).read_text())
    for path, entry in journal.items():
        found = sha256(root / path)
        if found not in (entry["before"], entry["after"]):
            raise PatchError(
                f"{root / path}: changed since verl-precision patch was interrupted; it was left alone. Restore it, "
                f"then run the command again; or remove {staging} and restore every file of the tree yourself."
            )
    for path, entry in journal.items():
        target = root / path
        if entry["staged"] is None:
            target.unlink(missing_ok=True)
            _remove_empty_folders(target.parent, root)
        elif sha256(target) != entry["after"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / entry["staged"], target)
            _sync_folder(target.parent)
    (staging / _JOURNAL).unlink()
    shutil.rmtree(staging)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _remove_empty_folders(folder: Path, root: Path) -> None:
    while folder != root and not (folder.is_dir() and any(folder.iterdir())):
        if folder.is_dir():
            folder.rmdir()
        folder = folder.parent
