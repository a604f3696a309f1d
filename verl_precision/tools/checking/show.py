"""What a terminal shows of a check."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from verl_precision.base.errors import describe, subject
from verl_precision.base.terminal import paragraph, terminal_table

if TYPE_CHECKING:  # some import torch, and the first findings are shown before that
    from verl_precision.check.rules.rule import Fault
    from verl_precision.tools.checking.activations import ActivationReport
    from verl_precision.tools.checking.checkpoint import CheckpointReport
    from verl_precision.tools.checking.installation import Finding
    from verl_precision.tools.checking.recipe_config import RecipeReport

WORST = 12
MARKS = {"error": ("ERROR ", "red"), "warning": ("warn  ", "yellow"), "unchecked": ("not checked ", "cyan")}


def show_recipe(report: RecipeReport, console: Console) -> None:
    """Print what runs in which dtype, what is trained, faults with remedies, the folder of checkpoints, the verdict."""
    rows = [(row.what, row.dtype, row.source) for row in report.rows]
    if rows:
        console.print(terminal_table(("what", "dtype", "decided by"), rows, words=3))
    if report.training:
        trained = [(row.what, row.value, row.source) for row in report.training]
        console.print(terminal_table(("trained", "value", "decided by"), trained, words=3))
    for each in report.replaced:
        line = f"presets=win: {each['word']} is replaced by {each['value']}, of {each['preset']}"
        console.print(Text(line), soft_wrap=True)
    show_faults(report.faults, console)
    if report.folder is not None:
        console.print(Text(f"checkpoints in {report.folder}"), soft_wrap=True)
    counts = report.counts
    said = f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['unchecked']} not checked"
    console.print(said, highlight=False)
    if report.way_out is not None:
        console.print(
            Text(f"For what the presets say, leave out: {shlex.join(report.way_out.leave_out)}"), soft_wrap=True
        )
        console.print(Text(f"The whole command: {report.way_out.command}"), soft_wrap=True)
        console.print(Text("Or add +presets=win to the command as it is."), soft_wrap=True)


def show_checkpoint(report: CheckpointReport, console: Console) -> None:
    """Print the worst tensors, then the verdict."""
    rows = []
    for t in report.tensors[:WORST]:
        counts = (str(t.overflows), str(t.not_finite), f"{t.subnormal:.2%}", f"{t.flushed:.2%}")
        rows.append((t.name, t.dtype, f"{t.largest:.4g}", *counts))
    headers = ("tensor", "stored", "max |w|", "overflow", "inf, NaN", "subnormal", "to zero")
    console.print(terminal_table(headers, rows, words=2))
    _rest(len(report.tensors), "tensors", console)
    if report.skipped:
        skipped = f"{len(report.skipped)} tensor(s) were skipped: they are not floats of at least 16 bits"
        console.print(skipped, highlight=False)
    console.print(Text(f"weights: {report.verdict}", "green" if report.ok else "red"), soft_wrap=True)


def show_activations(report: ActivationReport, console: Console) -> None:
    """Print the layers with least headroom, then the verdict."""
    rows = []
    for layer in report.layers[:WORST]:
        forward, backward = ("-" if room is None else f"{room:.3g}x" for room in report.headroom(layer))
        gradient = f"{layer.gradient * report.loss_scale:.4g}"
        rows.append((layer.name or "(logits)", f"{layer.activation:.4g}", forward, gradient, backward))
    headers = ("layer", "activation", "headroom", f"gradient x {report.loss_scale:g}", "headroom")
    console.print(terminal_table(headers, rows))
    _rest(len(report.layers), "layers", console)
    console.print(Text(f"activations: {report.verdict}", "green" if report.ok else "red"), soft_wrap=True)


def _rest(count: int, what: str, console: Console) -> None:
    if count > WORST:
        console.print(f"the {WORST} worst of {count} {what}; --json has all", highlight=False)


def show_installation(findings: Iterable[Finding], console: Console, every: bool) -> list[Finding]:
    """Print one line a group as soon as all of it is known, each problem in full, and the verdict; return the findings.

    With `every`, each finding has its line, at once: importing the host to look at it takes seconds.
    """
    found = []
    for group, members in groupby(findings, key=lambda finding: finding.group):
        known = []
        for finding in members:
            known.append(finding)
            if every or finding.warning or not finding.ok:
                show_findings([finding], console)
        if not every and all(finding.ok and not finding.warning for finding in known):
            rest = f" (and {len(known) - 1} more; -v shows all)" if len(known) > 1 else ""
            show_findings([replace(known[0], what=group, detail=f"{known[0].detail}{rest}")], console)
        found += known
    wrong = sum(not finding.ok for finding in found)
    verdict = Text(f"{wrong} problem(s): see FAIL above", "red") if wrong else Text("installation: ready", "green")
    console.print(verdict, highlight=False)
    return found


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print each finding, one line a finding."""
    for finding in findings:
        mark = Text("warn ", "yellow") if finding.warning else Text("ok   ", "green")
        mark = mark if finding.ok else Text("FAIL ", "red")
        said = paragraph(f"{finding.what}: {finding.detail}", console, " " * len(mark))[len(mark) :]
        console.print(mark, Text(said), sep="", soft_wrap=True, highlight=False)


def show_faults(faults: Iterable[Fault], console: Console) -> None:
    """Print each fault: name, setting and value, what happens, what to do."""
    for fault in faults:
        word, colour = MARKS[fault.severity or "error"]
        title = f"{fault.name}: {subject(fault.setting, fault.value)}"
        console.print(Text(word, colour), Text(title, "bold"), sep="", soft_wrap=True)
        for line in (fault.problem, describe("", allowed=fault.allowed, remedy=fault.remedy)):
            if line:
                console.print(Text(paragraph(line, console, "      ")), soft_wrap=True)
