"""A verl tree: which release it is, whether it may be touched, and which files a call has to change."""

from dataclasses import dataclass
from pathlib import Path

from verl_precision.base.errors import PatchError
from verl_precision.base.files import open_regular
from verl_precision.tools.patching.series import Series, State, sha256

_VERSION = Path("verl", "version", "version")
_INSTALLED = {"site-packages", "dist-packages"}
# Beside an installed package, tests/ is nobody's or anybody's: what a patch does there is left out.
_TESTS = "tests/"


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


def open_tree(path: Path, series_by_version: dict[str, Series]) -> Tree:
    """Recognise a checkout, an unpacked release, or a folder of installed packages: whatever holds `verl/`."""
    root = path.resolve()
    version = root / _VERSION
    if not version.is_file():
        hint = f" Did you mean {root.parent}?" if (root.parent / _VERSION).is_file() else ""
        raise PatchError(
            f"TREE={path}: unknown tree, {version} does not exist. Allowed is a folder that holds `verl/`: a checkout, "
            f"an unpacked release, or a folder of installed packages.{hint}"
        )
    with open_regular(version, most=200) as file:
        found = file.read().decode().strip()
    if found not in series_by_version:
        raise PatchError(
            f"TREE={root}: verl {found} has no series here; nothing was touched. Allowed: "
            f"{', '.join(sorted(series_by_version))}. Move to one of these releases first."
        )
    return Tree(root, series_by_version[found])


def require_permission(tree: Tree, installed: bool) -> None:
    """Refuse an installed package without --installed, and the option without one."""
    if tree.installed and not installed:
        raise PatchError(
            f"TREE={tree.root}: an installed package; nothing was touched. Unpack a copy and patch that, or name it: "
            "--installed."
        )
    if installed and not tree.installed:
        raise PatchError(f"--installed with TREE={tree.root}: not an installed package. Leave --installed out.")


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
        raise PatchError(
            f"TREE={tree.root}: dirty; neither verl {tree.series.version} as released nor with the whole series: "
            f"{', '.join(foreign)}. Nothing was touched. Restore these files, or apply the patches one by one with "
            f"git am from {tree.series.folder}."
        )
    return changed
