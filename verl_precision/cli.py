"""`verl-precision <verb>`."""

import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from verl_precision import __version__
from verl_precision.data.command import data
from verl_precision.errors import ConfigurationError, PatchError, VerlPrecisionError
from verl_precision.offline_mismatch.command import mismatch
from verl_precision.runs.report_command import report
from verl_precision.sanity_set.command import sanity_set

app = typer.Typer(
    name="verl-precision",
    help="Close the floating-point gap between training and rollout in verl.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(width=None if sys.stdout.isatty() else 100)
errors = Console(stderr=True)
Verb = Callable[..., None]


def verb(name: str, **settings: Any) -> Callable[[Verb], Verb]:
    """Make a function a verb: an error of ours ends it with exit code 1, Ctrl-C with 130 and what the verb says of it.

    Args:
        name: Name of the verb.
        settings: Settings of typer's command.
    """

    def register(function: Verb) -> Verb:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except VerlPrecisionError as error:
                errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(1) from None
            except KeyboardInterrupt as interrupt:
                errors.print(f"interrupted; {interrupt}" if str(interrupt) else "interrupted", soft_wrap=True)
                raise typer.Exit(130) from None

        app.command(name, **settings)(run)
        return function

    return register


def _version(value: bool) -> None:
    if value:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Close the floating-point gap between training and rollout in verl."""


@verb("check", context_settings={"ignore_unknown_options": True})
def check(
    config: Annotated[
        Path | None, typer.Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, e.g. precision=fp16")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of the run, e.g. A100. Default: the GPUs of this host.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Check whether this checkpoint, a folder or a .safetensors file, fits FP16.")
    ] = None,
    activations: Annotated[bool, typer.Option(help="With --model: also run prompts forward and backward.")] = False,
    loss_scale: Annotated[
        float, typer.Option(min=1, help="With --activations: the loss scale that gradients are multiplied by.")
    ] = 65536,
    cluster: Annotated[
        str | None, typer.Option(help="Check every node of this running Ray cluster: host:port, or auto.")
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(help="With --cluster: a file or folder that every node must have. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Say what will run in which dtype, what is wrong, and what to do. Nothing is started.

    With a recipe: its config, composed as verl would compose it.
    Without a recipe: the installation, that is versions, plugin, registrations.
    With --cluster: also every node: packages, plugin, GPUs, files of the recipe.
    With --model: the weights of a checkpoint.
    With --activations: also its activations and gradients.

    The exit code is 0 when there is no error, and 1 otherwise.
    """
    if (activations and model is None) or (model is not None and config is not None):
        raise typer.BadParameter("give a recipe, or --model PATH [--activations]")
    if (cluster is not None and (model is not None or as_json)) or (path and cluster is None):
        raise typer.BadParameter("give --cluster ADDRESS [--path PATH], with or without a recipe; it has no --json")
    from verl_precision.quiet import only_errors_of_others

    with only_errors_of_others():
        if model is not None:
            ok = _check_model(model, activations, loss_scale, as_json)
        elif config is not None:
            ok = _check_recipe(config, overrides or [], gpu, as_json)
        elif cluster is None:
            ok = _check_installation(as_json)
        else:
            ok = True
        if cluster is not None:
            ok = _check_cluster(cluster, config, overrides or [], path or []) and ok
    raise typer.Exit(0 if ok else 1)


def _check_recipe(config: Path, overrides: list[str], gpu: str | None, as_json: bool) -> bool:
    from verl_precision.check.show import show_recipe
    from verl_precision.integration.machine import gpus_here
    from verl_precision.integration.recipe_config import check_recipe

    report = check_recipe(config, overrides, gpus_here() if gpu is None else (gpu,))
    if as_json:
        print(report.as_json())
    else:
        show_recipe(report, console)
    return report.ok


def _check_model(model: Path, activations: bool, loss_scale: float, as_json: bool) -> bool:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from verl_precision.check.activations import measure_activations
    from verl_precision.check.checkpoint import audit_checkpoint
    from verl_precision.check.show import show_activations, show_checkpoint

    with Progress("auditing", BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=errors) as progress:
        task = progress.add_task("", total=None)
        weights = audit_checkpoint(model, lambda done, total: progress.update(task, completed=done, total=total))
    measured = measure_activations(model, loss_scale=loss_scale) if activations else None
    ok = weights.ok and (measured is None or measured.ok)
    if as_json:
        content = {"ok": ok, "weights": weights.as_dict(), "activations": measured and measured.as_dict()}
        print(json.dumps(content, indent=2))
    else:
        show_checkpoint(weights, console)
        if measured is not None:
            show_activations(measured, console)
    return ok


def _check_installation(as_json: bool) -> bool:
    from verl_precision.check.installation import findings
    from verl_precision.check.show import show_findings
    from verl_precision.versions import installed_versions

    found, versions = [], installed_versions()
    if not as_json:
        console.print("  ".join(f"{name} {version}" for name, version in versions.items()), highlight=False)
    for finding in findings():
        found.append(finding)
        if not as_json:
            show_findings([finding], console)  # at once: importing the host to look at it takes seconds
    if as_json:
        print(json.dumps({"versions": versions, "findings": [vars(f) for f in found]}, indent=2))
    return all(f.ok for f in found)


def _check_cluster(address: str, config: Path | None, overrides: list[str], paths: list[Path]) -> bool:
    from verl_precision.check.cluster import Needs, compare_nodes, look_at_nodes, needs_of
    from verl_precision.check.show import show_findings
    from verl_precision.integration.recipe_config import compose_recipe

    given = [str(path) for path in paths]
    needs = Needs(paths=tuple(given)) if config is None else needs_of(compose_recipe(config, overrides), given)
    found = list(compare_nodes(*look_at_nodes(address, needs.paths), needs))
    show_findings(found, console)
    return all(finding.ok for finding in found)


@verb("compare", context_settings={"ignore_unknown_options": True})
def compare(
    config: Annotated[Path, typer.Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides for every run, e.g. trainer.total_training_steps=4")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option("--precision", "-p", help="A preset; repeat it. Default: bf16 and fp16.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Results go to a new folder <output>/<recipe>/<time>.")] = Path(
        "outputs"
    ),
    pass_bar: Annotated[float | None, typer.Option(help="Say which runs end with a mean reward above it.")] = None,
    pass_steps: Annotated[int, typer.Option(help="The mean is taken over this many steps at the end.")] = 4,
) -> None:
    """Run one recipe in several precisions, one after the other; show the mismatch of each.

    Writes summary.json, comparison.png and, for each precision, metrics.jsonl and train.log. Ctrl-C ends the run at
    hand and every process it started.
    """
    from verl_precision.runs.compare import compare_precisions
    from verl_precision.runs.pass_bar import PassBar

    precisions = precision or ["bf16", "fp16"]
    folder = output / config.stem / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    bar = None if pass_bar is None else PassBar(pass_bar, pass_steps)
    try:
        compare_precisions(config, precisions, overrides or [], folder, console, bar)
    except KeyboardInterrupt:
        said = f"every process of the run has ended. What was measured is in {folder}"
        raise KeyboardInterrupt(said) from None


@verb("patch")
def patch(
    tree: Annotated[Path | None, typer.Argument(help="Holds verl/: a checkout or an unpacked release.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print every series and its patches.")] = False,
    check_: Annotated[bool, typer.Option("--check", help="Would it apply or revert? Writes nothing.")] = False,
    apply_: Annotated[bool, typer.Option("--apply", help="Apply the series of the tree's release.")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="Take it back, byte for byte.")] = False,
    installed: Annotated[bool, typer.Option("--installed", help="TREE is an installed package; patch that.")] = False,
) -> None:
    """Patch a verl that no plugin can reach, or take the patches back: all of them or none.

    Refused, naming the file: a tree that is not exactly a release with a series, or that release with the whole series
    applied. A call that was killed is finished or taken back by the next one. What each patch does: patches/README.md.
    """
    if [list_, check_, apply_, revert].count(True) != 1 or list_ != (tree is None):
        raise typer.BadParameter("give --list, or one of --check, --apply, --revert with TREE")
    from verl_precision.patching.command import State, change_tree, check_tree, list_series

    try:
        if list_:
            lines = list_series()
        elif check_:
            assert tree is not None  # parameters were checked above
            lines = [check_tree(tree)]
        else:
            assert tree is not None
            lines = change_tree(tree, State.APPLIED if apply_ else State.PRISTINE, installed)
    except OSError as error:
        raise PatchError(str(error)) from error
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@verb("tiny-model")
def tiny_model(
    architecture: Annotated[str, typer.Argument(help="Its architecture; an unknown name lists them.")],
    folder: Annotated[Path, typer.Argument(help="A folder to create.")],
) -> None:
    """Write a tiny random model with tokenizer: the one `scale=cpu` trains."""
    from verl_precision.tiny_model import build_tiny_model

    try:
        build_tiny_model(architecture, folder)
    except FileExistsError:
        raise ConfigurationError(f"{folder} exists; nothing was written. Name a folder that does not.") from None
    console.print(f"wrote {folder}: use it with actor_rollout_ref.model.path={shlex.quote(str(folder))}")


verb("report")(report)


@verb("arithmetic", hidden=True)
def arithmetic(folder: Annotated[Path, typer.Argument(help="A folder to create.")]) -> None:
    """Moved: run recipes/sanity_arithmetic/make_task.py FOLDER."""
    script = Path(__file__).parents[1] / "recipes" / "sanity_arithmetic" / "make_task.py"
    errors.print(
        "warning: this verb goes in the next version; run recipes/sanity_arithmetic/make_task.py", soft_wrap=True
    )
    if not script.is_file():
        raise ConfigurationError(
            "recipes/ is not beside this installation. Run make_task.py in a clone of the project."
        )
    done = subprocess.run([sys.executable, str(script), str(folder)])
    raise typer.Exit(done.returncode)


verb("data")(data)
verb("sanity-set")(sanity_set)
verb("mismatch")(mismatch)

if __name__ == "__main__":
    app()
