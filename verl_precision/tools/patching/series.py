"""A series of mail patches for one verl release, with the hashes of each file before and after; and the trees it fits.

Of a tree it is known which release it is, whether it may be touched, and which files a call has to change.
"""

import email
import email.policy
import hashlib
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from verl_precision.base.errors import PatchError
from verl_precision.base.files import open_regular, shipped_folder

MANIFEST = "hashes.json"
_VERSION = Path("verl", "version", "version")
_INSTALLED = {"site-packages", "dist-packages"}
# Beside an installed package, tests/ is nobody's or anybody's: what a patch does there is left out.
_TESTS = "tests/"
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.M)


class State(Enum):
    """State of the files that a series touches: as released, or with the whole series applied."""

    PRISTINE = "pristine"
    APPLIED = "applied"


@dataclass(frozen=True)
class Patch:
    """One patch: its file, its title without the mail's [PATCH n/m], the paths it touches, relative to the tree."""

    path: Path
    subject: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """All patches for one verl release."""

    version: str
    folder: Path
    patches: tuple[Patch, ...]  # in their order
    files: dict[str, dict[State, str | None]]  # SHA-256 of every file they touch; None in a state without the file


def available(folder: Path | None = None) -> dict[str, Series]:
    """Return the series by verl version, from `verl-<version>` in `folder` or in the package's `patches`."""
    folders = sorted((folder or shipped_folder("patches")).glob("verl-*"))
    return {series.version: series for series in map(load_series, folders)}


def list_series() -> list[str]:
    """Return what there is, in lines: each series with its folder, and its patches."""
    lines = []
    for version, series in sorted(available().items()):
        lines.append(f"verl {version}: {len(series.patches)} patches, {len(series.files)} files, {series.folder}")
        lines += [f"  {patch.path.name[:4]} {patch.subject}" for patch in series.patches]
    return lines


def load_series(folder: Path) -> Series:
    """Read a series from its folder, which holds `*.patch` and the hashes of exactly the files that they touch."""
    patches, manifest = read_patches(folder), folder / MANIFEST
    if not patches or not manifest.is_file():
        raise PatchError(f"{folder}: not a series; it needs *.patch files and {MANIFEST}. Reinstall verl-precision.")
    recorded = json.loads(manifest.read_text())
    keys = {State.PRISTINE: "pristine", State.APPLIED: "patched"}
    files = {path: {state: one[key] for state, key in keys.items()} for path, one in recorded["files"].items()}
    touched = {path for patch in patches for path in patch.files}
    if touched != set(files):
        problem = f"{manifest}: recorded for {sorted(files)}, but the patches touch {sorted(touched)}"
        raise PatchError(problem, remedy=f"Record it again: python patches/record_hashes.py {folder} TREE")
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


@dataclass(frozen=True)
class Tree:
    """A folder that holds `verl/`, its path resolved, and the series for its release."""

    root: Path
    series: Series

    @property
    def installed(self) -> bool:
        """Whether Python's package folders hold it."""
        return not _INSTALLED.isdisjoint(self.root.parts)

    @property
    def files(self) -> list[str]:
        """The files of the series that concern it: those under tests/ only beside tests of its own."""
        has_tests = (self.root / _TESTS).is_dir() and not self.installed
        return [path for path in self.series.files if has_tests or not path.startswith(_TESTS)]

    def refused(self, problem: str, remedy: str) -> PatchError:
        """Return the error that refuses it."""
        return PatchError(problem, setting="TREE", value=str(self.root), remedy=remedy)


def open_tree(path: Path, series_by_version: dict[str, Series]) -> Tree:
    """Recognise a checkout, an unpacked release, or a folder of installed packages: whatever holds `verl/`."""
    root = path.resolve()
    version = root / _VERSION
    if not version.is_file():
        hint = f"Did you mean {root.parent}?" if (root.parent / _VERSION).is_file() else ""
        problem, allowed = f"unknown tree, {version} does not exist", "a folder that holds `verl/`, as a checkout does"
        raise PatchError(problem, setting="TREE", value=str(path), allowed=allowed, remedy=hint)
    with open_regular(version, most=200) as file:
        found = file.read().decode().strip()
    if found not in series_by_version:
        problem, allowed = f"verl {found} has no series here; nothing was touched", ", ".join(sorted(series_by_version))
        raise PatchError(problem, setting="TREE", value=str(root), allowed=allowed)
    return Tree(root, series_by_version[found])


def require_permission(tree: Tree, installed: bool) -> None:
    """Refuse an installed package without --installed, and the option without one."""
    if tree.installed and not installed:
        remedy = "Unpack a copy and patch that, or name it: --installed."
        raise tree.refused("an installed package; nothing was touched", remedy)
    if installed and not tree.installed:
        raise tree.refused("--installed, and it is not an installed package", "Leave --installed out.")


def files_to_change(tree: Tree, goal: State) -> list[str]:
    """Return the files that are not yet in a state: all, none, or, after an interrupted call, some.

    A file that is neither that of the release nor that of the whole series is refused.
    """
    changed, foreign = [], []
    for path in tree.files:
        target, hashes = tree.root / path, tree.series.files[path]
        if target.is_symlink() or (target.exists() and not target.is_file()):
            foreign.append(f"{path} (not a regular file)")
        elif (found := sha256(target)) not in hashes.values():
            foreign.append(path)
        elif found != hashes[goal]:
            changed.append(path)
    if foreign:
        problem = f"dirty; neither verl {tree.series.version} as released nor with the whole series: "
        problem += f"{', '.join(foreign)}; nothing was touched"
        remedy = f"Restore these files, or apply the patches one by one with git am from {tree.series.folder}."
        raise tree.refused(problem, remedy)
    return changed
