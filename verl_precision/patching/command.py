"""`verl-precision patch`: list, check, apply, revert."""

from pathlib import Path

from verl_precision.errors import PatchError
from verl_precision.patching import patched, transaction
from verl_precision.patching.series import Series, available
from verl_precision.patching.tree import State, Tree, open_tree, require_permission, series_for, state_of, touched_files


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
    tree, series = _recognise(path)
    if transaction.interrupted(tree.root):
        raise PatchError(
            f"TREE={tree.root}: an earlier --apply or --revert was interrupted; files may be old or new. "
            "Run --apply or --revert: it finishes that one first."
        )
    state = state_of(tree, series)
    patched.contents(tree, series, _other(state))
    verb = "applies" if state is State.PRISTINE else "reverts"
    return (
        f"verl {tree.version} is {state.value}: the series of {len(series.patches)} patches {verb} cleanly to "
        f"{len(touched_files(tree, series))} files"
    )


def change_tree(path: Path, goal: State, installed: bool = False) -> list[str]:
    """Bring a tree into a state, all or nothing.

    Args:
        path: a folder that holds `verl/`.
        goal: `State.APPLIED` or `State.PRISTINE`.
        installed: whether an installed package was asked for by name.

    Returns:
        What was done, in lines.

    Raises:
        PatchError: if it is refused; the tree is then as it was.
    """
    tree, series = _recognise(path)
    require_permission(tree, installed)
    with transaction.exclusive(tree.root):
        done = ["finished an interrupted call"] if transaction.recover(tree.root) else []
        if state_of(tree, series) is goal:
            return [*done, f"verl {tree.version} is {goal.value} already: {tree.root}"]
        transaction.replace_all(tree.root, patched.contents(tree, series, goal))
    verb = "applied" if goal is State.APPLIED else "reverted"
    return [*done, f"{verb} {len(series.patches)} patches for verl {tree.version}: {tree.root}"]


def _recognise(path: Path) -> tuple[Tree, Series]:
    tree = open_tree(path)
    return tree, series_for(tree, available())


def _other(state: State) -> State:
    return State.APPLIED if state is State.PRISTINE else State.PRISTINE
