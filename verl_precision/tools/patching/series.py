"""A series of mail patches for one verl release, with each file's hashes before and after, and the verl tree.

A tree changes from one state into the other only if the hash of each file is the hash that the series records. Every
refusal is a `PatchError`, and leaves the tree unchanged.
"""

import email
import email.policy
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from verl_precision.base.errors import PatchError
from verl_precision.base.files import open_regular, shipped_folder

MANIFEST = "hashes.json"
_VERSION = Path("verl", "version", "version")
# Beside an installed package, tests/ may belong to any package: changes of patches to it are left out.
_TESTS = "tests/"
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.M)


class State(Enum):
    """State of the files that a series touches: as released, or with the whole series applied."""

    PRISTINE = "pristine"
    APPLIED = "applied"


class Patch(NamedTuple):
    """One patch: its file, its title without the mail's [PATCH n/m], the files it changes, relative to the tree."""

    path: Path
    subject: str
    files: tuple[str, ...]


class Series(NamedTuple):
    """All patches for one verl release."""

    version: str
    folder: Path
    patches: tuple[Patch, ...]  # in the order in which they apply
    files: dict[str, dict[State, str | None]]  # SHA-256 of every changed file; None in a state without the file


def available() -> dict[str, Series]:
    """Return each series by its verl version."""
    folders = sorted(shipped_folder("patches").glob("verl-*"))
    return {series.version: series for series in map(load_series, folders)}


def list_series() -> list[str]:
    """Return lines that list each series with its folder and patches."""
    lines = []
    for version, series in available().items():
        lines.append(f"verl {version}: {len(series.patches)} patches, {len(series.files)} files, {series.folder}")
        lines += [f"  {patch.path.name[:4]} {patch.subject}" for patch in series.patches]
    return lines


def load_series(folder: Path) -> Series:
    """Read a series from its folder, which has `*.patch` and the hashes of exactly the files that they change."""
    patches, recorded = read_patches(folder), json.loads((folder / MANIFEST).read_text())
    files = {
        path: {State.PRISTINE: one["pristine"], State.APPLIED: one["patched"]}
        for path, one in recorded["files"].items()
    }
    return Series(recorded["verl"], folder, patches, files)


def read_patches(folder: Path) -> tuple[Patch, ...]:
    """Return the patches of a folder, in the order of their numbers."""
    patches = []
    for path in sorted(folder.glob("*.patch")):
        text = path.read_text()
        subject = str(email.message_from_string(text, policy=email.policy.default)["Subject"])
        title = re.sub(r"^\[PATCH[^\]]*\] ", "", " ".join(subject.split()))
        patches.append(Patch(path, title, tuple(dict.fromkeys(_TARGET.findall(text)))))
    return tuple(patches)


def sha256(path: Path) -> str | None:
    """Return the hash of a file's bytes, or None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


class Tree:
    """A folder that has `verl/`: a checkout, an unpacked release, or a folder of installed packages."""

    def __init__(self, path: Path) -> None:
        self.root = path.resolve()
        version = self.root / _VERSION
        if not version.is_file():
            allowed = "a folder that holds `verl/`, as a checkout does"
            raise self.refused(f"unknown tree, {version} does not exist", allowed=allowed)
        with open_regular(version, most=200) as file:
            found, series = file.read().decode().strip(), available()
        if found not in series:
            raise self.refused(f"verl {found} has no patch series here; nothing was changed", allowed=", ".join(series))
        self.series = series[found]
        self.installed = not {"site-packages", "dist-packages"}.isdisjoint(self.root.parts)
        has_tests = (self.root / _TESTS).is_dir() and not self.installed
        self.files = [path for path in self.series.files if has_tests or not path.startswith(_TESTS)]

    def refused(self, problem: str, remedy: str = "", allowed: str = "") -> PatchError:
        """Return the error that refuses the tree."""
        return PatchError(problem, setting="TREE", value=str(self.root), allowed=allowed, remedy=remedy)

    @property
    def state(self) -> State:
        """Return the tree's state; if its files are not all in one state, refuse the tree and name these files."""
        found = {path: self._states_of(path) for path in self.files}
        for state in State:
            if all(state in states for states in found.values()):
                return state
        if foreign := [path for path, states in found.items() if not states]:
            problem = f"dirty; neither verl {self.series.version} as released nor verl with the whole series: "
            problem += f"{', '.join(foreign)}; nothing was changed"
        else:
            problem = "patched in part: " + ", ".join(path for path, states in found.items() if State.APPLIED in states)
        remedy = f"Restore these files, or apply the patches one by one with git am from {self.series.folder}."
        raise self.refused(problem, remedy)

    def _states_of(self, path: str) -> list[State]:
        target = self.root / path
        if target.is_symlink() or (target.exists() and not target.is_file()):
            return []
        found = sha256(target)
        return [state for state in State if self.series.files[path][state] == found]

    def change(self, check: bool = False) -> None:
        """Bring the tree into the other state; with `check`, only test whether that would work.

        `git apply` changes copies of the files. Their hashes are compared, then they are renamed into place.
        """
        (goal,) = {*State} - {self.state}
        prefix = ".verl-precision-patch-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=None if check else self.root) as name:
            copies = Path(name).resolve()
            for path in self.files:
                (copies / path).parent.mkdir(parents=True, exist_ok=True)
                if (self.root / path).exists():
                    shutil.copy(self.root / path, copies / path)
            for patch in self.series.patches if goal is State.APPLIED else reversed(self.series.patches):
                if not {*self.files}.isdisjoint(patch.files):
                    self._git_apply(copies, patch.path, ["-R"] * (goal is State.PRISTINE))
            hashes = {path: self.series.files[path][goal] for path in self.files}
            if wrong := [path for path in self.files if sha256(copies / path) != hashes[path]]:
                problem = f"{', '.join(wrong)}: not what is recorded in {self.series.folder}; nothing was changed"
                raise self.refused(problem, "Reinstall verl-precision.")
            for path in self.files if not check else ():
                if hashes[path] is None:
                    (self.root / path).unlink()
                    if not any((self.root / path).parent.iterdir()):
                        (self.root / path).parent.rmdir()
                else:
                    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(copies / path, self.root / path)

    def _git_apply(self, folder: Path, patch: Path, options: list[str]) -> None:
        if shutil.which("git") is None:
            raise PatchError("git was not found; it applies the patches. Install git.")
        # No repository, and no git setting of the user or machine, may change the result.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        environment |= dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull)
        command = ["git", "apply", "--whitespace=nowarn", *options]
        command += [*(f"--include={path}" for path in self.files), str(patch)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
        if done.returncode:
            problem = f"{patch.name} does not apply; nothing was changed. git says: {done.stderr.strip()}"
            raise self.refused(problem)


def check_tree(path: Path) -> str:
    """Return a message with the tree's state and whether the series would apply or revert; write nothing."""
    tree = Tree(path)
    tree.change(check=True)
    state = tree.state
    verb, option = ("reverts", "--revert") if state is State.APPLIED else ("applies", "--apply")
    patches = f"the series of {len(tree.series.patches)} patches {verb} cleanly to {len(tree.files)} files"
    return f"verl {tree.series.version} is {state.value}: {patches}\nnext: verl-precision patch {option} {path}"


def change_tree(path: Path, goal: State, installed: bool = False) -> str:
    """Bring a tree into a state, and return a message; `installed` allows an installed package."""
    tree = Tree(path)
    if tree.installed and not installed:
        remedy = "Unpack a copy and patch that, or add --installed."
        raise tree.refused("an installed package; nothing was changed", remedy)
    if tree.state is goal:
        return f"verl {tree.series.version} is {goal.value} already: {tree.root}"
    tree.change()
    verb = "applied" if goal is State.APPLIED else "reverted"
    return f"{verb} {len(tree.series.patches)} patches for verl {tree.series.version}: {tree.root}"
