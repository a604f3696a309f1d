"""A series: numbered mail patches for one verl release, and the hashes of every file before and after it."""

import email
import email.policy
import hashlib
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from verl_precision.base.errors import PatchError
from verl_precision.base.files import shipped_folder

MANIFEST = "hashes.json"
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
        raise PatchError(
            f"{manifest}: recorded for {sorted(files)}, but the patches touch {sorted(touched)}. "
            f"Record it again: python patches/record_hashes.py {folder} TREE"
        )
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
