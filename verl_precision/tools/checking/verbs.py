"""The verb `check`: is this run, this checkpoint, this machine, this cluster fit?"""

import atexit
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Exit, Option

from verl_precision.base.errors import VerlPrecisionError
from verl_precision.base.terminal import paragraph
from verl_precision.cli.verb import console, errors, silence_third_party, verb


@verb(context_settings={"ignore_unknown_options": True})
def check(
    config: Annotated[
        str | None,
        Argument(help="A recipe's YAML, or `--` and the command that starts verl. Overrides alone are of verl's own."),
    ] = None,
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides, e.g. precision=fp16.")] = None,
    gpu: Annotated[str | None, Option(help="GPU of the run, e.g. A100. Default: the GPU of this machine.")] = None,
    elsewhere: Annotated[
        bool | None,
        Option(
            "--elsewhere/--here",
            help="Whether the run is for another machine. Default: with --gpu, and where its GPU is not here.",
        ),
    ] = None,
    model_config: Annotated[
        Path | None, Option(help="A config.json, or its folder, that stands for the model's where that is not here.")
    ] = None,
    model: Annotated[Path | None, Option(help="Checkpoint to audit for FP16: a folder or a .safetensors file.")] = None,
    activations: Annotated[bool, Option(help="With --model: also run prompts forward and backward.")] = False,
    loss_scale: Annotated[float, Option(min=1, help="With --activations: factor on the gradients.")] = 65536,
    cluster: Annotated[
        str | None, Option(help="A running Ray, host:port or auto: check that every node is ready for the recipe.")
    ] = None,
    path: Annotated[
        list[Path] | None,
        Option(help="With --cluster: file or folder that every node must see. Repeat the option for several."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Without a config: print all that was looked at.")] = False,
) -> None:
    """Say what will run in which dtype, what is wrong, and what to do.

    With a recipe, overrides, or a command (`check -- python -m verl.trainer.main_ppo ...`): its config, composed as
    verl composes it. Without: versions, registrations, and whether the plugin is loaded. With --cluster: also whether
    every node of that Ray has the same packages, the plugin, GPUs, and the recipe's files. With --model: whether its
    weights, and with --activations its activations and gradients, fit FP16.
    The exit code is 0 when there is no error, else 1.
    """
    if activations and model is None:
        raise BadParameter("--activations needs a checkpoint. Give --model PATH too.")
    if model is not None and config is not None:
        raise BadParameter(f"a recipe ({config}) and --model {model}: allowed is one of them. Leave one out.")
    if cluster is not None and (model is not None or as_json):
        raise BadParameter("--cluster works with or without a recipe, not with --model or --json. Leave those out.")
    if path and cluster is None:
        raise BadParameter("--path is for the nodes of a cluster. Give --cluster ADDRESS too.")
    of_run = {"--gpu": gpu, "--elsewhere or --here": elsewhere, "--model-config": model_config}
    if config is None and (given := [name for name, value in of_run.items() if value is not None]):
        raise BadParameter(f"{given[0]} is about a run. Give a recipe, overrides or a command too.")
    ok, words = True, [] if config is None else [config, *(overrides or [])]
    with silence_third_party(), _without_collections():
        if model is not None:
            ok = _check_model(model, activations, loss_scale, as_json)
        elif words:
            ok = _check_recipe(words, (gpu, elsewhere, model_config), as_json)
        elif cluster is None:
            ok = _check_installation(as_json, verbose)
        if cluster is not None:
            ok = _check_cluster(cluster, words, path or []) and ok
    raise Exit(0 if ok else 1)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: imports make millions of objects that stay, a quarter of a check's time."""
    gc.disable()
    atexit.register(gc.freeze)  # nor at the end of the process
    try:
        yield
    finally:
        gc.enable()


def _check_recipe(words: list[str], meant: tuple[str | None, bool | None, Path | None], as_json: bool) -> bool:
    from verl_precision.base.versions import require_verl

    try:
        require_verl("a check of a config")
        from verl_precision.tools.checking.command import read_command
        from verl_precision.tools.checking.recipe_config import Meant, check_command
        from verl_precision.tools.checking.show import show_recipe

        report = check_command(read_command(words), Meant(*meant), typed=words)
    except VerlPrecisionError as error:
        if not as_json:
            raise
        fields = ("setting", "value", "problem", "allowed", "remedy")
        fault = {"name": "config-refused", "severity": "error", **{name: getattr(error, name) for name in fields}}
        print(json.dumps({"ok": False, "dtypes": [], "findings": [fault]}, indent=2, default=str))
        return False
    if as_json:
        print(report.as_json())
    else:
        show_recipe(report, console)
    return report.ok


def _check_model(model: Path, activations: bool, loss_scale: float, as_json: bool) -> bool:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from verl_precision.tools.checking.activations import measure_activations
    from verl_precision.tools.checking.checkpoint import audit_checkpoint
    from verl_precision.tools.checking.show import show_activations, show_checkpoint

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


def _check_installation(as_json: bool, verbose: bool) -> bool:
    from verl_precision.base.versions import installed_versions
    from verl_precision.tools.checking.installation import findings
    from verl_precision.tools.checking.show import show_installation

    versions = installed_versions()
    if as_json:
        found = list(findings())
        ok = all(finding.ok for finding in found)
        print(json.dumps({"ok": ok, "versions": versions, "findings": [vars(each) for each in found]}, indent=2))
        return ok
    named = "  ".join(f"{name}\u00a0{version}" for name, version in versions.items())  # a line ends between pairs
    console.print(paragraph(named, console).replace("\u00a0", " "), highlight=False, soft_wrap=True)
    return all(finding.ok for finding in show_installation(findings(), console, verbose))


def _check_cluster(address: str, words: list[str], paths: list[Path]) -> bool:
    from verl_precision.tools.checking.cluster import Needs, compare_nodes, look_at_nodes, needs_of
    from verl_precision.tools.checking.command import read_command
    from verl_precision.tools.checking.composing import compose_recipe
    from verl_precision.tools.checking.show import show_findings

    given = [str(path) for path in paths]
    needs = needs_of(compose_recipe(*read_command(words).accepted()), given) if words else Needs(paths=tuple(given))
    found = list(compare_nodes(*look_at_nodes(address, needs.paths), needs))
    show_findings(found, console)
    return all(finding.ok for finding in found)
