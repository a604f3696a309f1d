"""A verl tree brought from one state into the other: copies made by `git apply` beside it, checked, renamed into place.

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
from contextlib import contextmanager
from pathlib import Path

from verl_precision.base.errors import PatchError
from verl_precision.base.files import open_regular
from verl_precision.tools.patching.series import State, available, sha256

FOLDER = ".verl-precision-patch"
_VERSION = Path("verl", "version", "version")
# Beside an installed package, tests/ is nobody's or anybody's: what a patch does there is left out.
_TESTS = "tests/"


class Tree:
    """A checkout, an unpacked release, or a folder of installed packages: whatever holds `verl/`."""

    def __init__(self, path: Path) -> None:
        self.root = path.resolve()
        version = self.root / _VERSION
        if not version.is_file():
            allowed = "a folder that holds `verl/`, as a checkout does"
            raise PatchError(f"unknown tree, {version} does not exist", setting="TREE", value=path, allowed=allowed)
        with open_regular(version, most=200) as file:
            found, series = file.read().decode().strip(), available()
        if found not in series:
            raise self.refused(f"verl {found} has no series here; nothing was touched", allowed=", ".join(series))
        self.series = series[found]
        self.installed = not {"site-packages", "dist-packages"}.isdisjoint(self.root.parts)
        has_tests = (self.root / _TESTS).is_dir() and not self.installed
        self.files = [path for path in self.series.files if has_tests or not path.startswith(_TESTS)]

    def refused(self, problem: str, remedy: str = "", allowed: str = "") -> PatchError:
        """Return the error that refuses it."""
        return PatchError(problem, setting="TREE", value=str(self.root), allowed=allowed, remedy=remedy)

    def files_to_change(self, goal: State) -> list[str]:
        """Return the files that are not yet in a state: all, none, or, after an interrupted call, some.

        A file that is neither that of the release nor that of the whole series is refused.
        """
        changed, foreign = [], []
        for path in self.files:
            target, hashes = self.root / path, self.series.files[path]
            if target.is_symlink() or (target.exists() and not target.is_file()):
                foreign.append(f"{path} (not a regular file)")
            elif (found := sha256(target)) not in hashes.values():
                foreign.append(path)
            elif found != hashes[goal]:
                changed.append(path)
        if foreign:
            problem = f"dirty; neither verl {self.series.version} as released nor with the whole series: "
            problem += f"{', '.join(foreign)}; nothing was touched"
            remedy = f"Restore these files, or apply the patches one by one with git am from {self.series.folder}."
            raise self.refused(problem, remedy)
        return changed

    def make_copies(self, goal: State, paths: list[str], folder: Path) -> None:
        """Write into an empty folder the files of `paths` in another state, but for those that it lacks."""
        if shutil.which("git") is None:
            raise PatchError("git: not found; patches are applied by `git apply`. Install git.")
        for path in paths:
            if (self.root / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.root / path, folder / path)
        back = goal is State.PRISTINE
        for patch in reversed(self.series.patches) if back else self.series.patches:
            if chosen := [f"--include={path}" for path in patch.files if path in paths]:
                _git_apply(folder, patch.path, ["-R"] * back + chosen)
        for path in paths:
            if sha256(folder / path) != self.series.files[path][goal]:
                problem = f"{path}: the result is not what is recorded in {self.series.folder}; nothing was touched"
                raise PatchError(problem, remedy="Reinstall verl-precision.")

    def put_in_place(self, goal: State, paths: list[str], folder: Path) -> None:
        """Replace files by their copies, each by one rename, and remove those that the state does not have."""
        gone = [path for path in self.files if self.series.files[path][goal] is None]
        new = {folder / path: self.root / path for path in paths if path not in gone}
        for copy, target in new.items():
            if target.exists():
                shutil.copymode(target, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        for copy, target in new.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(copy, target)
        for path in gone:
            (self.root / path).unlink(missing_ok=True)
            for parent in (self.root / path).parents:  # also those that an interrupted call left empty
                if parent.exists():
                    if any(parent.iterdir()):
                        break
                    parent.rmdir()


def check_tree(path: Path) -> str:
    """Say in which state a tree is, and that the series would apply or revert; write nothing."""
    tree = Tree(path)
    pristine, applied = (tree.files_to_change(goal) for goal in (State.APPLIED, State.PRISTINE))
    if pristine and applied:
        problem = f"patched in part, as an interrupted call leaves it: {len(applied)} of {len(tree.files)} files"
        raise tree.refused(problem, "Run --apply or --revert: either brings all files into one state.")
    state, goal = (State.APPLIED, State.PRISTINE) if applied else (State.PRISTINE, State.APPLIED)
    with tempfile.TemporaryDirectory(prefix="verl-precision-") as folder:
        tree.make_copies(goal, tree.files, Path(folder).resolve())
    verb = "reverts" if applied else "applies"
    patches = f"the series of {len(tree.series.patches)} patches {verb} cleanly to {len(tree.files)} files"
    return f"verl {tree.series.version} is {state.value}: {patches}"


def change_tree(path: Path, goal: State, installed: bool = False) -> list[str]:
    """Bring every file that the series touches into a state; return what was done, in lines.

    `installed` says whether an installed package was asked for by name. A tree that is refused is as it was.
    """
    tree = Tree(path)
    if tree.installed and not installed:
        remedy = "Unpack a copy and patch that, or name it: --installed."
        raise tree.refused("an installed package; nothing was touched", remedy)
    if installed and not tree.installed:
        raise tree.refused("--installed, and it is not an installed package", "Leave --installed out.")
    with folder_for_copies(tree.root) as folder:
        paths = tree.files_to_change(goal)
        tree.make_copies(goal, paths, folder)
        tree.files_to_change(goal)  # refuses what was edited meanwhile
        tree.put_in_place(goal, paths, folder)
    if not paths:
        return [f"verl {tree.series.version} is {goal.value} already: {tree.root}"]
    finished = ["finished an interrupted call"] if len(paths) < len(tree.files) else []
    verb = "applied" if goal is State.APPLIED else "reverted"
    return [*finished, f"{verb} {len(tree.series.patches)} patches for verl {tree.series.version}: {tree.root}"]


@contextmanager
def folder_for_copies(root: Path) -> Iterator[Path]:
    """Hold a tree against other calls until this process ends, however it ends, and lend a folder beside its files."""
    folder, descriptor = root / FOLDER, os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PatchError(f"TREE={root}: another verl-precision patch is at work on it. Wait for it.") from None
    shutil.rmtree(folder, ignore_errors=True)  # a killed call left it; it holds copies only
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(descriptor)


def _git_apply(folder: Path, patch: Path, options: list[str]) -> None:
    # No repository, and no setting of a user or machine, may change what git does to the bytes.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    environment |= dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull)
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise PatchError(f"{patch.name} does not apply; nothing was touched. git says: {done.stderr.strip()}")
