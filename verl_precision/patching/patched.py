"""What a series makes of the files of a tree, computed by `git apply` on copies, and checked against the hashes."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from verl_precision.errors import PatchError
from verl_precision.patching.series import Series, sha256
from verl_precision.patching.tree import State, Tree, touched_files


def contents(tree: Tree, series: Series, goal: State) -> dict[str, bytes | None]:
    """Return the bytes of every touched file in the other state; the tree itself is only read.

    Args:
        tree: in the state that `goal` is not.
        series: of the tree's release.
        goal: the state to compute.

    Returns:
        By path; None for a file that does not exist in that state.

    Raises:
        PatchError: if git is missing, a patch does not apply, or the result is not what was recorded.
    """
    if shutil.which("git") is None:
        raise PatchError("git: not found; patches are applied by `git apply`. Install git.")
    paths = touched_files(tree, series)
    with tempfile.TemporaryDirectory(prefix="verl-precision-") as name:
        copy = Path(name).resolve()
        for path in paths:
            if (tree.root / path).exists():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree.root / path, copy / path)
        reverse = goal is State.PRISTINE
        for patch in reversed(series.patches) if reverse else series.patches:
            if set(patch.files) & set(paths):
                _git_apply(copy, patch.path, reverse, leave_out_tests=not tree.has_tests)
        for path in paths:
            hashes = series.files[path]
            if sha256(copy / path) != (hashes.pristine if reverse else hashes.patched):
                raise PatchError(
                    f"{path}: the result is not what is recorded in {series.folder}; nothing was touched. "
                    "Reinstall verl-precision."
                )
        return {path: (copy / path).read_bytes() if (copy / path).exists() else None for path in paths}


def _git_apply(folder: Path, patch: Path, reverse: bool, leave_out_tests: bool) -> None:
    # No repository, and no setting of a user or machine, may change what git does to the bytes.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }
    options = ["-R"] * reverse + ["--exclude=tests/*"] * leave_out_tests
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, str(patch)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise PatchError(f"{patch.name} does not apply; nothing was touched. git says: {done.stderr.strip()}")
