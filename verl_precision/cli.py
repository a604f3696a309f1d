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
from typer import Argument, BadParameter, Context, Exit, Option, Typer

from verl_precision import __version__
from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError, PatchError, VerlPrecisionError
from verl_precision.tools.data.catalog import CATALOG, TEMPLATES

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
    from verl_precision.tools.runs.quiet import silence_third_party

    ok = True
    with silence_third_party():
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
    from verl_precision.check.probe import gpus_here
    from verl_precision.check.recipe_config import check_recipe
    from verl_precision.check.show import show_recipe

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
    from verl_precision.base.versions import installed_versions
    from verl_precision.check.installation import findings
    from verl_precision.check.show import show_findings

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
    from verl_precision.check.recipe_config import compose_recipe
    from verl_precision.check.show import show_findings

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
    from verl_precision.tools.runs.compare.run import check_arguments, compare_runs
    from verl_precision.tools.runs.compare.summary import PassBar

    bar = None if pass_score is None else PassBar(pass_score, pass_steps)
    precisions, chosen = precision or ([] if arm else ["bf16", "fp16"]), overrides or []
    estimators, seeds = estimator or [], seed or []
    runs = check_arguments(config, precisions, chosen, estimators, arm or [], seeds)
    arms = list(dict.fromkeys(run.arm.name for run in runs)) if arm else []
    command = command_of(config, precisions, chosen, estimators, arms, seeds)
    with comparison_folder(output / config.stem, command, restart) as folder:
        if len(list(folder.iterdir())) > 1:  # more than the command
            console.print(f"This comparison was interrupted and goes on in {folder}. To start anew, add --restart.")
        with after_ctrl_c(f"every process of the run has ended, and the same command goes on in {folder}"):
            compare_runs(config, runs, chosen, folder, console, bar, parallel)


@verb("report")
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

    The page needs no network and no other file.
    """
    if absent := [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]:
        needed = f"the report needs {' and '.join(absent)}, not installed here"
        raise EnvironmentMismatchError(needed, remedy="pip install jinja2 'matplotlib>=3.8'")
    if (expected is None) != (estimator is None):
        raise BadParameter("--expected and --estimator belong together: give both, or neither")
    from verl_precision.tools.runs.expected import read_expected
    from verl_precision.tools.runs.page import page, write_page
    from verl_precision.tools.runs.read import read_runs

    curves = read_expected(expected, estimator) if expected and estimator else []
    write_page(output, page(read_runs(runs), expected=curves), force)
    console.print(f"wrote {output}: open it in a browser", soft_wrap=True)


def _folder_of(verb: str, model: str) -> Path:
    return Path("outputs") / verb / re.sub(r"[^\w.-]+", "-", Path(model).name)


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
    attention: Annotated[str, Option(help="Attention of the trainer: sdpa or flash_attention_2.")] = "sdpa",
    micro_batch_tokens: Annotated[int, Option(help="Tokens of one forward of the trainer.")] = 16384,
    output: Annotated[Path | None, Option(help="Folder of the results. Default: outputs/mismatch/<model>.")] = None,
    ray_address: Annotated[str | None, Option(help="Share the work among the GPUs of this Ray, e.g. auto.")] = None,
) -> None:
    """Sample in some dtypes, score in others, and show how far the probabilities of the two engines are apart.

    Nothing is trained. Writes table.md, summary.json and figures. A job that was interrupted continues when the
    command is repeated. One model is in memory at a time.
    """
    from verl_precision.tools.gap.pairs.session import measure_mismatch
    from verl_precision.tools.gap.pairs.settings import MismatchJob
    from verl_precision.tools.jobs.prompts import BUILT_IN_NAME, read_prompts

    values: dict[str, Any] = dict(model=model, responses=responses, max_response_tokens=max_response_tokens, seed=seed)
    values |= dict(attention=attention, micro_batch_tokens=micro_batch_tokens)
    values["prompts"] = BUILT_IN_NAME if prompts is None else str(prompts)
    values["rollout_dtypes"] = tuple(rollout_dtype or ("fp16", "bf16"))
    values["train_dtypes"] = tuple(train_dtype or ("fp16", "bf16"))
    job, chosen = MismatchJob(**values), read_prompts(prompts, prompt_field, max_prompts)
    folder = output or _folder_of("mismatch", model)
    with after_ctrl_c(f"every process has ended. What is done is in {folder}; the same command continues"):
        measure_mismatch(job, chosen, folder, console, ray_address, in_flight)


@verb("explain")
def explain(
    context: Context,
    overrides: Annotated[
        list[str] | None, Argument(help="With --recipe: Hydra overrides, e.g. precision=bf16.")
    ] = None,
    recipe: Annotated[
        Path | None,
        Option(help="A recipe's YAML, which has model, dtypes, sampling and prompts. Options go before it."),
    ] = None,
    run: Annotated[
        Path | None, Option(help="Folder or metrics file of a run: say what it has recorded. Nothing is computed.")
    ] = None,
    model: Annotated[str, Option(help="Model of the trainer: a folder, a hub name, or tiny:qwen3.")] = "tiny:qwen3",
    rollout_model: Annotated[
        str | None, Option(help="Model of the rollout, if it has other weights, e.g. an older export.")
    ] = None,
    adapter: Annotated[
        str | None, Option(help="Folder of a LoRA adapter that the trainer has; the rollout has it merged.")
    ] = None,
    rollout_dtype: Annotated[str, Option(help="Dtype of vLLM: bf16, fp16 or fp32.")] = "bf16",
    train_dtype: Annotated[str, Option(help="Dtype of the trainer.")] = "bf16",
    temperature: Annotated[float, Option(help="Temperature of both.")] = 1.0,
    top_p: Annotated[float, Option(help="Share of the probability that the rollout draws from.")] = 1.0,
    top_k: Annotated[int, Option(help="Most probable tokens that the rollout draws from; 0 for all.")] = 0,
    raw_log_probs: Annotated[
        bool, Option("--raw-log-probs", help="The rollout's log-probs are raw (logprobs_mode=raw_logprobs).")
    ] = False,
    prefix_caching: Annotated[
        bool, Option("--prefix-caching", help="The rollout has a prefix cache and cuts prompts into chunks.")
    ] = False,
    cuda_graphs: Annotated[
        bool, Option("--cuda-graphs", help="The rollout compiles, and runs CUDA graphs; on GPUs only.")
    ] = False,
    attention: Annotated[str, Option(help="Attention of the trainer, by its name in transformers.")] = "sdpa",
    packed: Annotated[bool, Option("--packed", help="The trainer packs (use_remove_padding); else it pads.")] = False,
    fp32_log_probs: Annotated[
        bool, Option("--fp32-log-probs/--16-bit-log-probs", help="How the trainer takes log-probs.")
    ] = True,
    fp32_output_head: Annotated[
        bool, Option("--fp32-output-head", help="The trainer computes its logits in FP32.")
    ] = False,
    micro_batch_tokens: Annotated[int, Option(help="Tokens of one forward of the trainer.")] = 16384,
    prompts: Annotated[Path | None, Option(help="A .parquet or .jsonl file. Default: 16 built-in questions.")] = None,
    prompt_field: Annotated[str, Option(help="Column of the prompts: chats in verl's format, or text.")] = "prompt",
    max_prompts: Annotated[
        int | None, Option(min=1, help="Use only this many prompts, from the first on. Default: 16 with --recipe.")
    ] = None,
    responses: Annotated[int, Option(help="Responses to each prompt.")] = 1,
    max_response_tokens: Annotated[int, Option(help="Largest number of tokens of a response.")] = 64,
    seed: Annotated[int, Option(help="Sampling seed.")] = 0,
    in_flight: Annotated[int, Option(min=1, help="Responses that each engine computes at a time.")] = 256,
    output: Annotated[Path | None, Option(help="Folder of the results. Default: outputs/explain/<model>.")] = None,
    ray_address: Annotated[str | None, Option(help="Share the work among the GPUs of this Ray, e.g. auto.")] = None,
) -> None:
    """Say which cause makes the gap between rollout and trainer, and what to do about it.

    vLLM draws responses, and their log-probs are computed again and again on the way to the trainer, with one thing
    changed each time: decode, batch, dtype, engine, weights, attention, packing, experts. What two neighbours differ by
    is the part of one cause, and the parts add up to the whole gap. "Nothing is wrong" is an answer too.

    With --recipe, settings are the recipe's. With --run, a run that was made says what it has recorded, and which
    command tells the rest.

    Writes explanation.html and explanation.json. A job that was interrupted continues when the command is repeated. One
    model is in memory at a time.
    """
    values = dict(locals())  # the options, most of them called as the settings are
    from verl_precision.tools.gap.explain.page import show, write
    from verl_precision.tools.gap.explain.session import explain as explain_gap
    from verl_precision.tools.gap.explain.settings import explanation_of
    from verl_precision.tools.jobs.prompts import BUILT_IN_NAME, read_prompts
    from verl_precision.tools.runs.quiet import silence_third_party

    given = {name for name in values if str(context.get_parameter_source(name)) == "ParameterSource.COMMANDLINE"}
    if (recipe and run) or (overrides and not recipe):
        raise BadParameter("allowed is --recipe with its overrides, or --run, or neither. Leave one out.")
    if run is not None:
        if others := sorted(given - {"run"}):
            raise BadParameter(f"--run tells what is recorded. Leave out --{others[0].replace('_', '-')}.")
        with silence_third_party():
            from verl_precision.tools.gap.explain.from_run import show_run

            show_run(run, console)
        return
    if recipe is not None:
        with silence_third_party():
            from verl_precision.check.recipe_config import compose_recipe
            from verl_precision.tools.gap.explain.from_config import explained_by

            of_recipe = explained_by(compose_recipe(recipe, overrides or []))
        values |= {name: value for name, value in of_recipe.items() if name not in given}
    chosen = None if values["prompts"] is None else Path(values["prompts"])
    job = explanation_of(values | {"prompts": BUILT_IN_NAME if chosen is None else str(chosen)})
    folder = output or _folder_of("explain", job.model if recipe is None else recipe.stem)
    with after_ctrl_c(f"every process has ended. What is done is in {folder}; the same command continues"):
        prompts_read = read_prompts(chosen, values["prompt_field"], values["max_prompts"])
        result = explain_gap(job, prompts_read, folder, console, ray_address, in_flight)
    write(folder, job, result, sys.argv)
    show(job, result, console)
    console.print(f"wrote explanation.html and explanation.json to {folder}", highlight=False, soft_wrap=True)


@verb("evaluate")
def evaluate(
    model: Annotated[str, Argument(help="Folder or hub name of the model, e.g. an exported checkpoint.")],
    data: Annotated[
        list[Path], Option(help="Data set in verl's format: .parquet or .jsonl. Repeat the option for several.")
    ],
    context: Annotated[
        list[int], Option(help="Most tokens of prompt and response together. Repeat the option for several.")
    ],
    dtype: Annotated[
        list[str] | None, Option(help="Dtype of vLLM: fp16, bf16 or fp32. Repeat it for several. Default: fp16.")
    ] = None,
    responses: Annotated[int, Option("--responses", "-n", help="Responses to each problem: k of avg@k.")] = 32,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 takes the most probable token.")] = 0.6,
    top_p: Annotated[float, Option(help="Share of the probability that is drawn from, most probable first.")] = 0.95,
    seed: Annotated[int, Option(help="Sampling seed. Each response gets its own seed from it.")] = 0,
    reward: Annotated[str, Option(help="verl, math-verify, or FILE.py:FUNCTION with verl's signature.")] = "verl",
    pass_score: Annotated[float, Option(help="Lowest score of a correct response.")] = 1.0,
    in_flight: Annotated[int, Option(min=1, help="Responses that each engine draws at a time.")] = 256,
    keep_text: Annotated[bool, Option("--keep-text", help="Write the responses' text into the journal.")] = False,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder of the results. Default: outputs/evaluate/<model>.")
    ] = None,
    ray_address: Annotated[str | None, Option(help="Draw on every GPU of this Ray; `local` starts one.")] = None,
) -> None:
    """Measure how often a model solves the problems of one or more data sets, in each dtype and context.

    Shows avg@k with its standard error, pass@k and the share of truncated responses; with several dtypes also the
    paired differences, which are the deployment gap. Writes table.md and summary.json. Every response is on disk before
    it counts: after an interruption, the same command continues.
    """
    from verl_precision.tools.evaluate.session import evaluate as evaluate_model
    from verl_precision.tools.evaluate.settings import Evaluation

    values: dict[str, Any] = dict(
        model=model, data=tuple(data), contexts=tuple(context), dtypes=tuple(dtype or ["fp16"])
    )
    values |= dict(responses=responses, temperature=temperature, top_p=top_p, seed=seed)
    evaluation = Evaluation(**values, reward=reward, pass_score=pass_score)
    folder = output or _folder_of("evaluate", model)
    with after_ctrl_c(f"every process has ended. What is done is in {folder}; the same command continues"):
        evaluate_model(evaluation, folder, console, ray_address, in_flight, keep_text)


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

    from verl_precision.tools.runs.quiet import silence_third_party

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
    name: Annotated[str, Argument(help=f"Name of the data set: {', '.join(CATALOG)}.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder. The file is called NAME.parquet.")] = Path("data"),
    template: Annotated[str | None, Option(help=f"Prompt template: {', '.join(TEMPLATES)}.")] = None,
    source: Annotated[Path | None, Option(help="Local .parquet or .jsonl file, instead of a download.")] = None,
    synthetic: Annotated[bool, Option("--synthetic", help="Write a few sums instead; needs no network.")] = False,
    skip_size_check: Annotated[
        bool, Option("--skip-size-check", help="Accept another number of problems than expected.")
    ] = False,
) -> None:
    """Write a data set of the paper, or one to evaluate on, in verl's format, after a check of columns and size."""
    from verl_precision.tools.data.prepare import prepare

    print(prepare(name, output / f"{name}.parquet", template, source, synthetic, skip_size_check))


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
    pass_score: Annotated[float, Option(help="Lowest score of a correct response.")] = 1.0,
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
    from verl_precision.tools.sanity_set.session import Options, build_sanity_set
    from verl_precision.tools.sanity_set.window import Window

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
