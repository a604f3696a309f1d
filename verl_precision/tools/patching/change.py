"""Files of a tree in another state: made by `git apply` on copies beside it, checked, put in place by one rename each.

There is no journal. A file's hash says in which state it is, so a call that dies between two renames leaves a tree that
the next call finishes or takes back. Folders are never renamed, because the overlay file system of a container refuses
that for a folder that comes with the image. Whatever is refused is a `PatchError`.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl_precision.base.errors import PatchError
from verl_precision.tools.patching.series import (
    State,
    Tree,
    available,
    files_to_change,
    open_tree,
    require_permission,
    sha256,
)

FOLDER = ".verl-precision-patch"


def check_tree(path: Path) -> str:
    """Say in which state a tree is, and that the series would apply or revert; write nothing."""
    tree = open_tree(path, available())
    pristine, applied = (files_to_change(tree, goal) for goal in (State.APPLIED, State.PRISTINE))
    if pristine and applied:
        problem = f"patched in part, as an interrupted call leaves it: {len(applied)} of {len(tree.files)} files"
        raise tree.refused(problem, "Run --apply or --revert: either brings all files into one state.")
    state, goal = (State.APPLIED, State.PRISTINE) if applied else (State.PRISTINE, State.APPLIED)
    verb = "reverts" if applied else "applies"
    with tempfile.TemporaryDirectory(prefix="verl-precision-") as folder:
        make_copies(tree, goal, tree.files, Path(folder).resolve())
    patches = f"the series of {len(tree.series.patches)} patches {verb} cleanly to {len(tree.files)} files"
    return f"verl {tree.series.version} is {state.value}: {patches}"


def change_tree(path: Path, goal: State, installed: bool = False) -> list[str]:
    """Bring every file that the series touches into a state; return what was done, in lines.

    `installed` says whether an installed package was asked for by name. A tree that is refused is as it was.
    """
    tree = open_tree(path, available())
    require_permission(tree, installed)
    with folder_for_copies(tree.root) as folder:
        paths = files_to_change(tree, goal)
        make_copies(tree, goal, paths, folder)
        files_to_change(tree, goal)  # refuses what was edited meanwhile
        put_in_place(tree, goal, paths, folder)
    if not paths:
        return [f"verl {tree.series.version} is {goal.value} already: {tree.root}"]
    finished = ["finished an interrupted call"] if len(paths) < len(tree.files) else []
    verb = "applied" if goal is State.APPLIED else "reverted"
    return [*finished, f"{verb} {len(tree.series.patches)} patches for verl {tree.series.version}: {tree.root}"]


@contextmanager
def folder_for_copies(root: Path) -> Iterator[Path]:
    """Hold a tree against other calls until this process ends, however it ends, and lend a folder beside its files."""
    folder, descriptor = root / FOLDER, os.open(root, os.O_RDONLY)
    with ExitStack() as at_the_end:
        at_the_end.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"TREE={root}: another verl-precision patch is at work on it. Wait for it.") from None
        if folder.exists():  # a killed call left it; it holds copies only
            shutil.rmtree(folder)
        folder.mkdir()
        at_the_end.callback(shutil.rmtree, folder)
        yield folder


def make_copies(tree: Tree, goal: State, paths: list[str], folder: Path) -> None:
    """Write into an empty folder the files of a tree (`paths`) in another state, but for those that it lacks."""
    if shutil.which("git") is None:
        raise PatchError("git: not found; patches are applied by `git apply`. Install git.")
    for path in paths:
        if (tree.root / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree.root / path, folder / path)
    reverse = goal is State.PRISTINE
    for patch in reversed(tree.series.patches) if reverse else tree.series.patches:
        if chosen := [f"--include={path}" for path in patch.files if path in paths]:
            _git_apply(folder, patch.path, ["-R"] * reverse + chosen)
    for path in paths:
        if sha256(folder / path) != tree.series.files[path][goal]:
            problem = f"{path}: the result is not what is recorded in {tree.series.folder}; nothing was touched"
            raise PatchError(problem, remedy="Reinstall verl-precision.")


def put_in_place(tree: Tree, goal: State, paths: list[str], folder: Path) -> None:
    """Replace files of a tree by their copies, each by one rename, and remove those that the state does not have.

    Nothing is touched if a file belongs to another user, in whose name this one cannot write.
    """
    gone = [path for path in tree.files if tree.series.files[path][goal] is None]
    new = {folder / path: tree.root / path for path in paths if path not in gone}
    for copy, target in new.items():
        like = next(path for path in (target, *target.parents) if path.exists())
        _make_alike(copy, like, bits=0o7777 if like == target else 0o666)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
    for copy, target in new.items():
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                _make_alike(parent, parent.parent)
        os.replace(copy, target)
    for path in gone:
        if path in paths:
            (tree.root / path).unlink()
        for parent in (tree.root / path).parents:  # also those that an interrupted call left empty
            if parent.exists():
                if any(parent.iterdir()):
                    break
                parent.rmdir()


def _git_apply(folder: Path, patch: Path, options: list[str]) -> None:
    # No repository, and no setting of a user or machine, may change what git does to the bytes.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise PatchError(f"{patch.name} does not apply; nothing was touched. git says: {done.stderr.strip()}")


def _make_alike(path: Path, like: Path, bits: int = 0o7777) -> None:
    """Give a file or folder the owner of another one, and those of its permissions that are in `bits`."""
    found, wanted = path.stat(), like.stat()
    if (found.st_uid, found.st_gid) != (wanted.st_uid, wanted.st_gid):
        try:
            os.chown(path, wanted.st_uid, wanted.st_gid)
        except PermissionError:
            problem = f"{like}: it belongs to user {wanted.st_uid}, group {wanted.st_gid}, and the copy would not"
            remedy = "Run the command as that user or as root."
            raise PatchError(f"{problem}; nothing was touched", remedy=remedy) from None
    path.chmod(wanted.st_mode & bits)
