"""`verl-precision <verb>`: every verb, its options, and the one handler of errors and Ctrl-C.

What a verb needs is imported inside its function, so that `--help` and a refused option take a fraction of a second.
"""

import functools
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, BadParameter, Exit, Option, Typer

from verl_precision import __version__
from verl_precision.errors import ConfigurationError, EnvironmentMismatchError, PatchError, VerlPrecisionError

app = Typer(name="verl-precision", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)


def verb(name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a verb: one of our errors ends it with exit code 1, Ctrl-C with 130.

    Args:
        name: Name of the verb.
        settings: Settings of typer's command.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        # Typer would keep the line breaks inside a paragraph.
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(each.split()) for each in paragraphs)

        @app.command(name, help=text, **settings)
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except VerlPrecisionError as error:
                errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
                raise Exit(1) from None
            except KeyboardInterrupt as interrupt:
                errors.print(f"interrupted; {interrupt}" if str(interrupt) else "interrupted", soft_wrap=True)
                raise Exit(130) from None

        return function

    return register


@contextmanager
def after_ctrl_c(text: str) -> Iterator[None]:
    """Have this text shown if Ctrl-C ends what is inside."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(text) from None


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
    config: Annotated[Path | None, Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml.")] = None,
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
) -> None:
    """Say what will run in which dtype, what is wrong, and what to do.

    With a recipe: its config, composed as verl composes it. Without: versions, registrations, and whether the plugin is
    loaded. With --cluster: also whether every node of that Ray has the same packages, the plugin, GPUs, and the
    recipe's files. With --model: whether its weights, and with --activations its activations and gradients, fit FP16.
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
    from verl_precision.quiet import only_errors_of_others

    ok = True
    with only_errors_of_others():
        if model is not None:
            ok = _check_model(model, activations, loss_scale, as_json)
        elif config is not None:
            ok = _check_recipe(config, overrides or [], gpu, as_json)
        elif cluster is None:
            ok = _check_installation(as_json)
        if cluster is not None:
            ok = _check_cluster(cluster, config, overrides or [], path or []) and ok
    raise Exit(0 if ok else 1)


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

    if as_json:
        found = list(findings())
        print(
            json.dumps({"versions": installed_versions(), "findings": [vars(finding) for finding in found]}, indent=2)
        )
        return all(finding.ok for finding in found)
    console.print("  ".join(f"{name} {version}" for name, version in installed_versions().items()), highlight=False)
    ok = True
    for finding in findings():
        show_findings([finding], console)  # at once: importing the host to look at it takes seconds
        ok = ok and finding.ok
    return ok


def _check_cluster(address: str, config: Path | None, overrides: list[str], paths: list[Path]) -> bool:
    from verl_precision.check.cluster import Needs, compare_nodes, look_at_nodes, needs_of
    from verl_precision.check.show import show_findings
    from verl_precision.integration.recipe_config import compose_recipe

    given = [str(path) for path in paths]
    needs = Needs(paths=tuple(given)) if config is None else needs_of(compose_recipe(config, overrides), given)
    found = list(compare_nodes(*look_at_nodes(address, needs.paths), needs))
    show_findings(found, console)
    return all(finding.ok for finding in found)


@verb("selftest")
def selftest(
    only: Annotated[
        list[str] | None, Option(help="Name of a check, or A or B for a part. Repeat the option for several.")
    ] = None,
    device: Annotated[str | None, Option(help="cuda or cpu. Default: the GPU, if torch sees one.")] = None,
    side_by_side: Annotated[
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

    from verl_precision.selftest.session import run_selftest, runs_that_fit, show_summary

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise BadParameter(f"--device {device}: allowed: cuda, cpu")
    folder = output or Path("outputs") / "selftest" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with after_ctrl_c(f"every process has ended. --output {folder} continues"):
        outcomes = run_selftest(folder, device, only or [], side_by_side or runs_that_fit(device), console)
    show_summary(outcomes, console)
    console.print(f"Results: {folder}", soft_wrap=True)
    raise Exit(1 if any(outcome.status == "failed" for outcome in outcomes) else 0)


@verb("compare", context_settings={"ignore_unknown_options": True})
def compare(
    config: Annotated[Path, Argument(help="A recipe's YAML, e.g. recipes/quickstart/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None, Argument(help="Hydra overrides for every run, e.g. trainer.total_training_steps=4.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        Option("--precision", "-p", help="Precision preset. Repeat the option for several. Default: bf16 and fp16."),
    ] = None,
    output: Annotated[Path, Option(help="Results go to a new folder <output>/<recipe>/<time>.")] = Path("outputs"),
    pass_bar: Annotated[float | None, Option(help="Say which runs end with a mean reward above this value.")] = None,
    pass_steps: Annotated[int, Option(help="With --pass-bar: number of last steps of the mean.")] = 4,
) -> None:
    """Run one recipe in several precisions, one after the other, and show the mismatch of each.

    Writes summary.json, comparison.png, report.html and, for each precision, metrics.jsonl and train.log. Ctrl-C ends
    the current run and every process it started.
    """
    from verl_precision.runs.compare import compare_precisions
    from verl_precision.runs.results import PassBar

    bar = None if pass_bar is None else PassBar(pass_bar, pass_steps)
    folder = output / config.stem / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with after_ctrl_c(f"every process of the run has ended. What was measured is in {folder}"):
        compare_precisions(config, precision or ["bf16", "fp16"], overrides or [], folder, console, bar)


@verb("report")
def report(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Metrics file (.jsonl), console log, TensorBoard events, or a folder of them."),
    ],
    output: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    force: Annotated[bool, Option("--force", help="Replace a file that is not an earlier report.")] = False,
) -> None:
    """Write one HTML page about runs: reward, mismatch, clipping, loss scale, alarms. Several runs are overlaid.

    The page needs no network and no other file.
    """
    if absent := [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]:
        needed = f"the report needs {' and '.join(absent)}, not installed here"
        raise EnvironmentMismatchError(needed, remedy="pip install jinja2 'matplotlib>=3.8'")
    from verl_precision.runs.page import page, write_page
    from verl_precision.runs.read import read_runs

    write_page(output, page(read_runs(runs)), force)
    console.print(f"wrote {output}: open it in a browser", soft_wrap=True)


@verb("mismatch")
def mismatch(
    model: Annotated[str, Option(help="Folder or hub name of the model; tiny:qwen3 is built in.")] = "tiny:qwen3",
    prompts: Annotated[Path | None, Option(help="A .parquet or .jsonl file. Default: 16 built-in questions.")] = None,
    prompt_field: Annotated[str, Option(help="Column of the prompts: chats in verl's format, or text.")] = "prompt",
    max_prompts: Annotated[int | None, Option(min=1, help="Use only this many prompts, from the first on.")] = None,
    rollout_dtype: Annotated[
        list[str] | None, Option(help="Dtype of vLLM. Repeat the option for several. Default: fp16 and bf16.")
    ] = None,
    train_dtype: Annotated[
        list[str] | None, Option(help="Dtype of the trainer, in the same way. Default: fp16 and bf16.")
    ] = None,
    responses: Annotated[int, Option(help="Responses to each prompt, in each rollout dtype.")] = 8,
    max_response_tokens: Annotated[int, Option(help="Largest number of tokens of a response.")] = 1024,
    seed: Annotated[int, Option(help="Sampling seed.")] = 0,
    in_flight: Annotated[int, Option(min=1, help="Responses that each engine samples or scores at a time.")] = 256,
    shard_responses: Annotated[int | None, Option(min=1, hidden=True, help="Former name of --in-flight.")] = None,
    attention: Annotated[str, Option(help="Attention of the trainer: sdpa or flash_attention_2.")] = "sdpa",
    micro_batch_tokens: Annotated[int, Option(help="Tokens of one forward of the trainer.")] = 16384,
    output: Annotated[Path | None, Option(help="Folder of the results. Default: outputs/mismatch/<model>.")] = None,
    ray_address: Annotated[str | None, Option(help="Share the work among the GPUs of this Ray, e.g. auto.")] = None,
) -> None:
    """Sample in some dtypes, score in others, and show how far the probabilities of the two engines are apart.

    Nothing is trained. Writes table.md, summary.json and figures. A job that was interrupted continues when the
    command is repeated. One model is in memory at a time.
    """
    from verl_precision.offline_mismatch.prompts import BUILT_IN_NAME, read_prompts
    from verl_precision.offline_mismatch.session import measure_mismatch
    from verl_precision.offline_mismatch.settings import MismatchJob

    if shard_responses is not None:
        errors.print("warning: --shard-responses is now called --in-flight; the old name goes with the next version")
        in_flight = shard_responses
    values: dict[str, Any] = dict(model=model, responses=responses, max_response_tokens=max_response_tokens, seed=seed)
    values |= dict(attention=attention, micro_batch_tokens=micro_batch_tokens)
    values["prompts"] = BUILT_IN_NAME if prompts is None else str(prompts)
    values["rollout_dtypes"] = tuple(rollout_dtype or ("fp16", "bf16"))
    values["train_dtypes"] = tuple(train_dtype or ("fp16", "bf16"))
    job, chosen = MismatchJob(**values), read_prompts(prompts, prompt_field, max_prompts)
    folder = output or Path("outputs") / "mismatch" / re.sub(r"[^\w.-]+", "-", Path(model).name)
    with after_ctrl_c(f"every process has ended. What is done is in {folder}; the same command continues"):
        measure_mismatch(job, chosen, folder, console, ray_address, in_flight)


@verb("data")
def data(
    name: Annotated[str, Argument(help="Name of the data set. An unknown name lists all names.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder. The file is called NAME.parquet.")] = Path("data"),
    template: Annotated[str | None, Option(help="Prompt template. An unknown name lists all names.")] = None,
    source: Annotated[Path | None, Option(help="Local .parquet or .jsonl file, instead of a download.")] = None,
    stand_in: Annotated[bool, Option("--stand-in", help="Write a few sums instead; needs no network.")] = False,
    any_count: Annotated[bool, Option("--any-count", help="Accept another number of problems than expected.")] = False,
) -> None:
    """Write one of the paper's data sets in verl's format, after a check of its columns and its size."""
    from verl_precision.data.prepare import prepare

    print(prepare(name, output / f"{name}.parquet", template, source, stand_in, any_count))


def _share(text: str) -> Fraction:
    try:
        return Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise BadParameter(f"{text!r}: allowed: a share such as 0.2, 20% or 1/5") from None


@verb("sanity-set")
def sanity_set(
    data: Annotated[Path, Argument(help="Data set in verl's format: a .parquet or .jsonl file.")],
    model: Annotated[str, Option("--model", "-m", help="Folder or hub name of the model that will be trained.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder of the results. A folder given again is resumed.")],
    responses_per_problem: Annotated[int, Option("--responses-per-problem", "-n", help="Number of responses.")] = 40,
    low: Annotated[Fraction, Option(parser=_share, metavar="SHARE", help="Lowest accuracy kept.")] = "0.2",  # type: ignore[assignment]
    high: Annotated[Fraction, Option(parser=_share, metavar="SHARE", help="Highest accuracy kept.")] = "0.8",  # type: ignore[assignment]
    reward: Annotated[str, Option(help="verl, math-verify, or FILE.py:FUNCTION with verl's signature.")] = "verl",
    correct_at: Annotated[float, Option(help="Lowest score of a correct response.")] = 1.0,
    dtype: Annotated[str, Option(help="Dtype of the engine: fp16, bf16 or fp32.")] = "fp16",
    max_prompt_length: Annotated[
        int, Option(min=1, help="Largest number of tokens; longer prompts are left out.")
    ] = 1024,
    max_response_length: Annotated[
        int, Option(min=1, help="Largest number of tokens; longer responses are cut.")
    ] = 6976,
    seed: Annotated[int, Option(help="Sampling seed. Each response gets its own seed from it.")] = 0,
    in_flight: Annotated[int, Option(min=1, help="Responses that each engine draws at a time.")] = 512,
    all_responses: Annotated[bool, Option("--all-responses", help="Also draw for decided problems.")] = False,
    keep_text: Annotated[bool, Option("--keep-text", help="Write the responses' text into the journal.")] = False,
    recorded: Annotated[Path | None, Option("--responses", help="Replay this journal instead of sampling.")] = None,
    ray_address: Annotated[str | None, Option(help="Draw on every GPU of this Ray; `local` starts one.")] = None,
    engines: Annotated[int | None, Option(min=1, help="With --ray-address: number of engines. Default: GPUs.")] = None,
) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1, and keeps the problems with an accuracy from --low to --high. A
    problem gets no further response when its verdict can no longer change. Every response is on disk before it counts:
    after an interruption, the same command continues. Writes kept.parquet, summary.json and accuracy.png.
    """
    values = dict(locals())  # the options, most of them called as the settings are
    from verl_precision.sanity_set.session import Options, build_sanity_set
    from verl_precision.sanity_set.verdict import Window

    window = Window(values.pop("responses_per_problem"), values.pop("low"), values.pop("high"))
    options = Options(window=window, early_stopping=not values.pop("all_responses"), **values)
    with after_ctrl_c(f"every response that was ready is in {output}. The same command continues."):
        build_sanity_set(options, console)


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
    from verl_precision.patching.change import change_tree, check_tree
    from verl_precision.patching.series import State, list_series

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


@verb("tiny-model")
def tiny_model(
    architecture: Annotated[str, Argument(help="Architecture of the model. An unknown name lists all names.")],
    folder: Annotated[Path, Argument(help="Folder to create.")],
) -> None:
    """Write a tiny random model with tokenizer: the model that `scale=cpu` trains."""
    from verl_precision.tiny_model import build_tiny_model

    try:
        build_tiny_model(architecture, folder)
    except FileExistsError:
        raise ConfigurationError(f"{folder} exists; nothing was written. Name a folder that does not.") from None
    console.print(f"wrote {folder}: use it with actor_rollout_ref.model.path={shlex.quote(str(folder))}")


@verb("arithmetic", hidden=True)
def arithmetic(folder: Annotated[Path, Argument(help="Folder to create.")]) -> None:
    """Moved: run recipes/sanity_arithmetic/make_task.py FOLDER."""
    moved = "warning: this verb goes in the next version; run recipes/sanity_arithmetic/make_task.py"
    errors.print(moved, soft_wrap=True)
    script = Path(__file__).parents[1] / "recipes" / "sanity_arithmetic" / "make_task.py"
    if not script.is_file():
        raise ConfigurationError("no recipes/ beside this installation. Run make_task.py in a clone of the project.")
    raise Exit(subprocess.run([sys.executable, str(script), str(folder)]).returncode)


if __name__ == "__main__":
    app()
