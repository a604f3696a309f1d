"""A series of mail patches for one verl release, with the hashes of each file before and after."""

import email
import email.policy
import hashlib
import json
import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from verl_precision.base.errors import PatchError
from verl_precision.base.files import shipped_folder

MANIFEST = "hashes.json"
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.M)


class State(Enum):
    """State of the files that a series touches: as released, or with the whole series applied."""

    PRISTINE = "pristine"
    APPLIED = "applied"


class Patch(NamedTuple):
    """One patch: its file, its title without the mail's [PATCH n/m], the paths it touches, relative to the tree."""

    path: Path
    subject: str
    files: tuple[str, ...]


class Series(NamedTuple):
    """All patches for one verl release."""

    version: str
    folder: Path
    patches: tuple[Patch, ...]  # in their order
    files: dict[str, dict[State, str | None]]  # SHA-256 of every file they touch; None in a state without the file


def available() -> dict[str, Series]:
    """Return the series by verl version."""
    folders = sorted(shipped_folder("patches").glob("verl-*"))
    return {series.version: series for series in map(load_series, folders)}


def list_series() -> list[str]:
    """Return what there is, in lines: each series with its folder, and its patches."""
    lines = []
    for version, series in available().items():
        lines.append(f"verl {version}: {len(series.patches)} patches, {len(series.files)} files, {series.folder}")
        lines += [f"  {patch.path.name[:4]} {patch.subject}" for patch in series.patches]
    return lines


def load_series(folder: Path) -> Series:
    """Read a series from its folder, which holds `*.patch` and the hashes of exactly the files that they touch."""
    patches, recorded = read_patches(folder), json.loads((folder / MANIFEST).read_text())
    files = {
        path: {State.PRISTINE: one["pristine"], State.APPLIED: one["patched"]}
        for path, one in recorded["files"].items()
    }
    touched = {path for patch in patches for path in patch.files}
    if touched != set(files):
        problem = f"{folder / MANIFEST}: recorded for {sorted(files)}, but the patches touch {sorted(touched)}"
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
