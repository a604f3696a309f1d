"""The verb `patch`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from verl_precision.cli.verb import say, verb


@verb("Set-up")
def patch(
    tree: Annotated[Path | None, Argument(help="Folder that holds verl/: a checkout or an unpacked release.")] = None,
    list_: Annotated[bool, Option("--list", help="Print every series and its patches.")] = False,
    check_: Annotated[bool, Option("--check", help="Report whether the series fits; write nothing.")] = False,
    apply_: Annotated[bool, Option("--apply", help="Apply the series of the tree's release.")] = False,
    revert: Annotated[bool, Option("--revert", help="Revert the series, byte for byte.")] = False,
    installed: Annotated[bool, Option("--installed", help="Allow TREE to be an installed package.")] = False,
) -> None:
    """Patch a verl release that has no plugins, or revert the patches: all of them or none.

    TREE must be exactly a release that has a series, or that release with the whole series applied. Otherwise the
    command names the files that differ. patches/README.md explains each patch.
    """
    if [list_, check_, apply_, revert].count(True) != 1 or list_ != (tree is None):
        raise BadParameter("give --list, or one of --check, --apply, --revert with TREE")
    from verl_precision.tools.patching.series import State, change_tree, check_tree, list_series

    if tree is None:
        say("\n".join(list_series()))
    elif check_:
        say(check_tree(tree))
    else:
        say(change_tree(tree, State.APPLIED if apply_ else State.PRISTINE, installed))
