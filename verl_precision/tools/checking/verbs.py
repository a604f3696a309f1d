"""The verb `check`, and its output on a terminal."""

import gc
import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text
from typer import Argument, BadParameter, Exit, Option

from verl_precision.base.errors import ConfigurationError, VerlPrecisionError, describe, subject
from verl_precision.base.terminal import paragraph, terminal_table
from verl_precision.cli.verb import console, errors, say, silence_third_party, verb

if TYPE_CHECKING:  # these modules may import torch; the first findings are shown earlier
    from verl_precision.tools.checking.installation import Finding
    from verl_precision.tools.checking.recipe_config import RecipeReport

WORST = 12  # tensors that are shown
MARKS = {"error": ("ERROR ", "red"), "warning": ("warn  ", "yellow"), "unchecked": ("not checked ", "cyan")}


@verb("Before a run", ignore_unknown_options=True)
def check(
    config: Annotated[
        str | None,
        Argument(help="A recipe's YAML, or `--` and the command that starts verl. Overrides alone: verl's own config."),
    ] = None,
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides, e.g. precision=fp16.")] = None,
    gpu: Annotated[str | None, Option(help="GPU of the run, e.g. A100. Default: the GPU of this machine.")] = None,
    model_config: Annotated[
        Path | None, Option(help="A config.json or its folder, if the model is not on this machine.")
    ] = None,
    model: Annotated[Path | None, Option(help="Weights to check for FP16: a folder or a .safetensors file.")] = None,
    cluster: Annotated[
        str | None, Option(help="A running Ray, as host:port or auto: check that every node is ready for the recipe.")
    ] = None,
    path: Annotated[
        list[Path] | None,
        Option(help="With --cluster: file or folder that every node must have. Repeat the option for several."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the dtypes of a run, the faults of its config, and their remedies. Nothing starts.

    Give a recipe, overrides, or a command (`check -- python -m verl.trainer.main_ppo ...`); its config is composed as
    verl does it. Without these, check shows versions, registrations and whether the plugin is loaded. With --cluster it
    also compares packages, plugin, GPUs and files on every node of that Ray. With --model it checks whether weights fit
    FP16.
    The exit code is 0 when there is no error, else 1.
    """
    if model is not None and config is not None:
        raise BadParameter(f"a recipe ({config}) and --model {model}: only one is allowed. Leave the other out.")
    if cluster is not None and (model is not None or as_json):
        raise BadParameter("--cluster works with or without a recipe, not with --model or --json. Leave those out.")
    if path and cluster is None:
        raise BadParameter("--path needs a cluster. Give --cluster ADDRESS too.")
    if config is None and (gpu or model_config):
        raise BadParameter("--gpu and --model-config need a run. Give a recipe or a command too.")
    ok, words = True, [] if config is None else [config, *(overrides or [])]
    gc.set_threshold(200_000)  # imports make millions of lasting objects; collecting takes a quarter of the time
    with silence_third_party():
        if model is not None:
            ok = _check_model(model, as_json)
        elif words:
            ok = _check_recipe(words, gpu, model_config, as_json)
        elif cluster is None:
            ok = _check_installation(as_json)
        if cluster is not None:
            ok = _check_cluster(cluster, words, [str(each) for each in path or []]) and ok
    raise Exit(0 if ok else 1)


def _check_recipe(words: list[str], gpu: str | None, model_config: Path | None, as_json: bool) -> bool:
    from verl_precision.base.versions import require_verl

    try:
        require_verl("a check of a config")
        from verl_precision.check.rules.rule import fault_of_error
        from verl_precision.tools.checking.composing import read_command
        from verl_precision.tools.checking.recipe_config import check_command

        gone: list[ConfigurationError] = []
        report = check_command(*read_command(words, gone), words, gpu=gpu, model_config=model_config)
        report.faults[:0] = [fault_of_error(error, "main-gone", "error") for error in gone]
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
        start = "start the run, then verl-precision watch FOLDER (that of its metrics)"
        say(f"next: {start if report.ok else 'change what is marked ERROR, and check again'}")
    return report.ok


def show_recipe(report: "RecipeReport", to: Console) -> None:
    """Print the dtypes, the training, faults with remedies, the folder of checkpoints and the verdict."""
    for rows, columns in ((report.rows, ("what", "dtype")), (report.training, ("trained", "value"))):
        if rows:
            to.print(terminal_table((*columns, "decided by"), rows, words=3))
    for each in report.replaced:
        say(f"presets=win: {each['word']} is replaced by {each['value']}, of {each['preset']}", to)
    if own := [each.word for each in report.words if each.preset.startswith("scale=") and not each.contradicts]:
        say(f"words over the scale: {shlex.join(dict.fromkeys(own))}", to)
    for fault in report.faults:
        word, colour = MARKS[fault.severity or "error"]
        title = f"{fault.name}: {subject(fault.setting, fault.value)}"
        to.print(Text(word, colour), Text(title, "bold"), sep="", soft_wrap=True)
        for line in filter(None, (fault.problem, describe("", allowed=fault.allowed, remedy=fault.remedy))):
            say(paragraph(line, to, "      "), to)
    if report.folder is not None:
        say(f"checkpoints in {report.folder}", to)
    counts = report.counts
    say(f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['unchecked']} not checked", to)
    if report.way_out:
        say(f"To use the presets' values, leave out: {shlex.join(report.way_out['leave_out'])}", to)
        to.print(Text(f"The whole command: {report.way_out['command']}"), soft_wrap=True)  # in one piece, to copy it
        say("Or add +presets=win to the command as it is.", to)


def _check_model(model: Path, as_json: bool) -> bool:
    from rich.progress import track

    from verl_precision.tools.checking.checkpoint import audit_checkpoint

    weights = audit_checkpoint(model, lambda tensors: track(tensors, "auditing", console=errors))
    if as_json:
        told = {"ok": weights.ok, "weights": {**asdict(weights), "ok": weights.ok, "verdict": weights.verdict}}
        print(json.dumps(told, indent=2, default=str))
        return weights.ok
    rows = []
    for t in weights.tensors[:WORST]:
        counts = (str(t.overflows), str(t.not_finite), f"{t.subnormal:.2%}", f"{t.flushed:.2%}")
        rows.append((t.name, t.dtype, f"{t.largest:.4g}", *counts))
    columns = ("tensor", "stored", "max |w|", "overflow", "inf, NaN", "subnormal", "to zero")
    console.print(terminal_table(columns, rows, words=2))
    if len(weights.tensors) > WORST:
        say(f"the {WORST} worst of {len(weights.tensors)} tensors; --json has all")
    if weights.skipped:
        say(f"{len(weights.skipped)} tensor(s) were skipped: they are not floats of at least 16 bits")
    say(f"weights: {weights.verdict}", style="green" if weights.ok else "red")
    if weights.ok:
        say(f"next, its gap: verl-precision mismatch --model {shlex.quote(str(model))}")
    return weights.ok


def _check_installation(as_json: bool) -> bool:
    from verl_precision.base.versions import installed_versions
    from verl_precision.tools.checking.installation import findings

    versions = installed_versions()
    if as_json:
        found = list(findings())
        ok = all(each.ok for each in found)
        print(json.dumps({"ok": ok, "versions": versions, "findings": [*map(vars, found)]}, indent=2))
        return ok
    named = "  ".join(f"{name}\u00a0{version}" for name, version in versions.items())  # lines break only between pairs
    say(paragraph(named, console).replace("\u00a0", " "))
    if wrong := _show_findings(findings()):
        say(f"{wrong} problem(s): see FAIL above", style="red")
    else:
        say("installation: ready", style="green")
        say("next: check your own command: verl-precision check -- python -m verl.trainer.main_ppo ...")
    return not wrong


def _check_cluster(address: str, words: list[str], paths: list[str]) -> bool:
    from verl_precision.tools.checking.composing import compose_recipe, read_command
    from verl_precision.tools.checking.installation import compare_nodes, look_at_nodes, needs_of

    nodes, gpus = 0, 0
    if words:
        nodes, gpus, paths = needs_of(compose_recipe(*read_command(words)), paths)
    return not _show_findings(compare_nodes(*look_at_nodes(address, paths), nodes, gpus))


def _show_findings(findings: Iterable["Finding"]) -> int:
    """Print each finding as soon as it is known, one line for each; return the number of problems."""
    wrong = 0
    for finding in findings:
        mark = Text("warn ", "yellow") if finding.warning else Text("ok   ", "green")
        mark = mark if finding.ok else Text("FAIL ", "red")
        said = paragraph(f"{finding.what}: {finding.detail}", console, " " * len(mark))[len(mark) :]
        console.print(mark, Text(said), sep="", soft_wrap=True, highlight=False)
        wrong += not finding.ok
    return wrong
