"""A series: numbered mail patches for one verl release, and the hashes of every file before and after it."""

import email
import email.policy
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import PatchError

MANIFEST = "hashes.json"
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.M)


@dataclass(frozen=True)
class Patch:
    """One patch.

    Attributes:
        path: its file.
        subject: its title, without the mail's [PATCH n/m].
        files: the paths it touches, relative to the tree.
    """

    path: Path
    subject: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class FileHashes:
    """SHA-256 of one file; None where it does not exist.

    Attributes:
        pristine: in the release.
        patched: with the whole series applied.
    """

    pristine: str | None
    patched: str | None


@dataclass(frozen=True)
class Series:
    """All patches for one release, in their order.

    Attributes:
        version: the verl release they are made for, as in its `verl/version/version`.
        folder: where they are.
        patches: in order.
        files: hashes of every file that any of them touches.
    """

    version: str
    folder: Path
    patches: tuple[Patch, ...]
    files: dict[str, FileHashes]


def patches_folder() -> Path:
    """Return the folder of the series: package data of an installed package, `patches/` of a checkout.

    Raises:
        PatchError: if neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "patches", package.parent / "patches")
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise PatchError(
        f"no patches found: looked in {candidates[0]} (installed package) and {candidates[1]} (checkout). "
        "Reinstall verl-precision."
    )


def available(folder: Path | None = None) -> dict[str, Series]:
    """Return the series by verl version.

    Args:
        folder: holds one folder `verl-<version>` a series. None: `patches_folder()`.
    """
    folders = sorted((folder or patches_folder()).glob("verl-*"))
    return {series.version: series for series in map(load_series, folders)}


def load_series(folder: Path) -> Series:
    """Read a series.

    Args:
        folder: `verl-<version>`, with `*.patch` and `hashes.json`.

    Raises:
        PatchError: if the hashes are missing or are not those of the files the patches touch.
    """
    patches = read_patches(folder)
    manifest = folder / MANIFEST
    if not patches or not manifest.is_file():
        raise PatchError(f"{folder}: not a series; it needs *.patch files and {MANIFEST}. Reinstall verl-precision.")
    recorded = json.loads(manifest.read_text())
    files = {path: FileHashes(**hashes) for path, hashes in recorded["files"].items()}
    touched = {path for patch in patches for path in patch.files}
    if touched != set(files):
        raise PatchError(
            f"{manifest}: recorded for {sorted(files)}, but the patches touch {sorted(touched)}. "
            f"Record it again: python patches/record_hashes.py {folder} TREE"
        )
    return Series(recorded["verl"], folder, patches, files)


def read_patches(folder: Path) -> tuple[Patch, ...]:
    """Return the patches of a folder, in the order of their numbers."""
    return tuple(_read_patch(path) for path in sorted(folder.glob("*.patch")))


def sha256(path: Path) -> str | None:
    """Return the hash of a file's bytes, or None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read_patch(path: Path) -> Patch:
    text = path.read_text()
    subject = email.message_from_string(text, policy=email.policy.default)["Subject"]
    title = re.sub(r"^\[PATCH[^\]]*\] ", "", " ".join(str(subject).split()))
    return Patch(path, title, tuple(dict.fromkeys(_TARGET.findall(text))))
