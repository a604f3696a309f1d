"""`verl-precision patch`: list, check, apply, revert."""

import tempfile
from pathlib import Path

from verl_precision.errors import PatchError
from verl_precision.patching.change import folder_for_copies, make_copies, put_in_place
from verl_precision.patching.series import State, available
from verl_precision.patching.tree import files_to_change, open_tree, require_permission


def list_series() -> list[str]:
    """Return what there is, in lines: each series, its patches, its folder."""
    lines = []
    for version, series in sorted(available().items()):
        lines.append(f"verl {version}: {len(series.patches)} patches, {len(series.files)} files, {series.folder}")
        lines += [f"  {patch.path.name[:4]} {patch.subject}" for patch in series.patches]
    return lines


def check_tree(path: Path) -> str:
    """Say in which state a tree is, and that the series would apply or revert; write nothing.

    Raises:
        PatchError: if an apply or revert would be refused, or an earlier one was interrupted.
    """
    tree = open_tree(path, available())
    to_apply, to_revert = (files_to_change(tree, goal) for goal in (State.APPLIED, State.PRISTINE))
    if to_apply and to_revert:
        raise PatchError(
            f"TREE={tree.root}: patched in part, as an interrupted call leaves it: {len(to_revert)} of "
            f"{len(to_apply) + len(to_revert)} files. Run --apply or --revert: either brings all files into one state."
        )
    goal, paths, verb = (State.APPLIED, to_apply, "applies") if to_apply else (State.PRISTINE, to_revert, "reverts")
    with tempfile.TemporaryDirectory(prefix="verl-precision-") as folder:
        make_copies(tree, goal, paths, Path(folder).resolve())
    state = State.PRISTINE if to_apply else State.APPLIED
    patches = f"the series of {len(tree.series.patches)} patches {verb} cleanly to {len(paths)} files"
    return f"verl {tree.series.version} is {state.value}: {patches}"


def change_tree(path: Path, goal: State, installed: bool = False) -> list[str]:
    """Bring every file that the series touches into a state.

    Args:
        path: a folder that holds `verl/`.
        goal: `State.APPLIED` or `State.PRISTINE`.
        installed: whether an installed package was asked for by name.

    Returns:
        What was done, in lines.

    Raises:
        PatchError: if it is refused; the tree is then as it was.
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
    verb = "applied" if goal is State.APPLIED else "reverted"
    done = f"{verb} {len(tree.series.patches)} patches for verl {tree.series.version}: {tree.root}"
    return ["finished an interrupted call", done] if len(paths) < len(tree.files) else [done]
