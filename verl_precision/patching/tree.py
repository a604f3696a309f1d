"""A verl tree: which release it is, whether it may be touched, and which state its files are in."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from verl_precision.errors import PatchError
from verl_precision.patching.series import Series, sha256

_VERSION = Path("verl", "version", "version")
_INSTALLED = {"site-packages", "dist-packages"}
# Beside an installed package, tests/ is nobody's or anybody's: what a patch does there is left out.
_TESTS = "tests/"


class State(Enum):
    """State of the files that a series touches."""

    PRISTINE = "pristine"
    APPLIED = "applied"


@dataclass(frozen=True)
class Tree:
    """A folder that holds `verl/`.

    Attributes:
        root: resolved path.
        version: content of `verl/version/version`.
    """

    root: Path
    version: str

    @property
    def installed(self) -> bool:
        """Whether Python's package folders hold it."""
        return not _INSTALLED.isdisjoint(self.root.parts)

    @property
    def has_tests(self) -> bool:
        """Whether it is a checkout or an unpacked release, with tests beside the package."""
        return (self.root / _TESTS).is_dir() and not self.installed


def open_tree(path: Path) -> Tree:
    """Recognise a tree.

    Args:
        path: a checkout, an unpacked release, or a folder of installed packages: what holds `verl/`.

    Raises:
        PatchError: if it holds no verl.
    """
    root = path.resolve()
    version = root / _VERSION
    if not version.is_file():
        hint = f" Did you mean {root.parent}?" if (root.parent / _VERSION).is_file() else ""
        raise PatchError(
            f"TREE={path}: unknown tree, {version} does not exist. Allowed is a folder that holds `verl/`: a checkout, "
            f"an unpacked release, or a folder of installed packages.{hint}"
        )
    return Tree(root, version.read_text().strip())


def require_permission(tree: Tree, installed: bool) -> None:
    """Refuse an installed package unless it was asked for by name.

    Args:
        tree: what would be written to.
        installed: whether --installed was given.

    Raises:
        PatchError: if the two disagree.
    """
    if tree.installed and not installed:
        raise PatchError(
            f"TREE={tree.root}: an installed package; nothing was touched. Unpack a copy and patch that, or name it: "
            "--installed."
        )
    if installed and not tree.installed:
        raise PatchError(f"--installed with TREE={tree.root}: not an installed package. Leave --installed out.")


def series_for(tree: Tree, series_by_version: dict[str, Series]) -> Series:
    """Return the series of a tree's release.

    Raises:
        PatchError: if there is none.
    """
    if tree.version not in series_by_version:
        raise PatchError(
            f"TREE={tree.root}: verl {tree.version} has no series here; nothing was touched. Allowed: "
            f"{', '.join(sorted(series_by_version))}."
        )
    return series_by_version[tree.version]


def touched_files(tree: Tree, series: Series) -> tuple[str, ...]:
    """Return the files of a series that concern a tree: those under tests/ only where it has its own."""
    return tuple(path for path in series.files if tree.has_tests or not path.startswith(_TESTS))


def state_of(tree: Tree, series: Series) -> State:
    """Say whether the files are those of the release or those of the whole series.

    Raises:
        PatchError: if a file is neither, or some are one and some the other.
    """
    by_state: dict[State | None, list[str]] = {State.PRISTINE: [], State.APPLIED: [], None: []}
    for path in touched_files(tree, series):
        target, hashes = tree.root / path, series.files[path]
        if target.is_symlink() or (target.exists() and not target.is_file()):
            by_state[None].append(f"{path} (not a regular file)")
        elif (found := sha256(target)) == hashes.pristine:
            by_state[State.PRISTINE].append(path)
        else:
            by_state[State.APPLIED if found == hashes.patched else None].append(path)
    if by_state[None]:
        raise PatchError(
            f"TREE={tree.root}: dirty; neither verl {tree.version} as released nor with the whole series: "
            f"{', '.join(by_state[None])}. Nothing was touched. Restore these files, or apply the patches one by one "
            f"with git am from {series.folder}."
        )
    if by_state[State.PRISTINE] and by_state[State.APPLIED]:
        raise PatchError(
            f"TREE={tree.root}: patched in part, and not by this command: {', '.join(by_state[State.APPLIED])}. "
            "Nothing was touched. Restore these files first."
        )
    return State.APPLIED if by_state[State.APPLIED] else State.PRISTINE
