"""The result of an explanation: a table on the terminal, JSON, and one HTML page with a waterfall of the parts."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator
from rich.console import Console

from verl_precision.base.files import write_file
from verl_precision.tools.gap.explain.judge import FLOOR, Finding, Result
from verl_precision.tools.gap.explain.operations import FAMILIES, Operations
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.show.figures import COLOURS, RED, image, new_figure, style
from verl_precision.tools.show.pages import render
from verl_precision.tools.show.tables import terminal_table, write_json

FILES = ("explanation.json", "explanation.html")
_COLUMNS = ("step", "what is changed", "size (nats)", "by rounding", "part of |gap|", "share of k3", "k3 without", "")


def verdict(job: Explanation, result: Result) -> str:
    """Return the answer in a sentence or two."""
    faults = [finding for finding in result.findings if finding.fault]
    gap = f"Mean |gap| {result.attribution.nats:.2e} nats, k3 {result.attribution.k3:.2e}."
    if faults:
        named = "; ".join(f"{each.variant.cause}: {each.cause.title}" for each in faults)
        return f"{gap} Something is wrong. {named}."
    pair = f"{job.train_dtype} training with a {job.rollout_dtype} rollout"
    return f"{gap} Nothing is wrong: this is what {pair} costs on this model."


def rows(result: Result) -> list[tuple[str, ...]]:
    """Return a row for each step, faults first: `_COLUMNS`."""
    share = result.attribution.share
    return [
        (
            each.variant.cause, each.variant.words,
            f"{each.part.size:.1e}", f"{each.expected:.1e}", f"{each.part.nats:.1e}",
            f"{share(each.part):.1%}", f"{each.part.without:.1e}", "FAULT" if each.fault else "",
        )
        for each in result.findings
    ]  # fmt: skip


def advice(result: Result) -> list[Finding]:
    """Return the steps against which something should be done: the faults, or else the largest cost of a dtype."""
    faults = [each for each in result.findings if each.fault]
    return faults or [each for each in result.findings if each.part.k3 > 0][:1]


def operations_text(variant: str, found: Operations) -> str:
    """Return what the operations of a variant do, in a sentence."""
    if not found.operations:
        types = ", ".join(FAMILIES)
        return f"Operations at {variant}: not compared. It takes a model of type {types}, and a vLLM not compiled."
    first = f"the first that differs is {found.first}" if found.first else "each differs by rounding alone"
    most = ", ".join(f"{one.kind} {one.share:.0%}" for one in found.operations[:4] if one.share > 0)
    if found.first is None and found.nats < FLOOR:  # shares of nothing
        return f"Operations at {variant}: {first}."
    return f"Operations at {variant}: {first}. They add most: {most or 'nothing'}."


def show(job: Explanation, result: Result, console: Console) -> None:
    """Print verdict, table and remedies."""
    say = partial(console.print, soft_wrap=True, highlight=False)
    say(verdict(job, result))
    faults = {number for number, finding in enumerate(result.findings) if finding.fault}
    console.print(terminal_table(_COLUMNS, rows(result), words=2, red=faults))
    for variant, found in result.operations.items():
        say(operations_text(variant, found))
    for each in advice(result):
        seen = f" Seen: {each.evidence}." if each.evidence else ""
        say(f"{each.variant.cause}: {each.cause.remedy}. Effect: {each.cause.effect}.{seen}")
    if left_out := result.attribution.left_out:
        say(f"{left_out} tokens have no finite log-prob in some variant, and are left out.", style="red")


def write(folder: Path, job: Explanation, result: Result, envelope: Mapping[str, Any]) -> None:
    """Write `FILES`."""
    whole = result.attribution
    content = {
        "verdict": verdict(job, result),
        "nats": whole.nats, "k3": whole.k3, "tokens": whole.tokens, "tokens_left_out": whole.left_out,
        "bf16_cost": result.bf16_cost,
        "steps": [
            {
                "cause": each.variant.cause, "what": each.cause.title, "changed": each.variant.words,
                "fault": each.fault, "size_nats": each.part.size, "expected_nats": each.expected,
                "nats": each.part.nats, "k3": each.part.k3, "k3_without": each.part.without,
                "share": whole.share(each.part), "evidence": each.evidence, "remedy": each.cause.remedy,
                "effect": each.cause.effect,
            }
            for each in result.findings
        ],
        "operations": {name: asdict(found) for name, found in result.operations.items()},
        "path": [one.name for one in result.chain],
        **envelope,
        "command": shlex.join(envelope["command"]),
    }  # fmt: skip
    write_json(folder / "explanation.json", content)
    compared = {name: found for name, found in result.operations.items() if found.operations}
    operations = [(name, found, operations_text(name, found), _by_layer(found)) for name, found in compared.items()]
    page = render(
        "gap/explain/page.html", "explain", content=content, model=job.model, columns=_COLUMNS, rows=rows(result),
        advice=advice(result), operations=operations, waterfall=_waterfall(result),
    )  # fmt: skip
    write_file(folder / "explanation.html", page, replace=True)


def _waterfall(result: Result) -> str:
    """Draw the parts of the k3 from the rollout to the trainer: each bar begins where the one before ends."""
    faults = {each.variant.name for each in result.findings if each.fault}
    parts, start = result.attribution.parts, 0.0
    figure = new_figure(9, 0.42 * len(parts) + 1.6)
    axis = figure.subplots()
    for row, (variant, part) in enumerate(zip(result.chain[1:], parts, strict=True)):
        axis.barh(row, part.k3, left=start, color=COLOURS[variant.name in faults])
        axis.text(max(start, start + part.k3), row, f" {result.attribution.share(part):.0%}", va="center")
        start += part.k3
    axis.barh(len(parts), result.attribution.k3, color=COLOURS[-1])
    axis.set_yticks(range(len(parts) + 1), [variant.cause for variant in result.chain[1:]] + ["the whole gap"])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    style(axis, "k3 (nats a token)", grid=False)
    return image(figure, "waterfall")


def _by_layer(found: Operations) -> str:
    """Draw the relative error of each kind of operation over the layers; what has no layer is a dashed line."""
    figure = new_figure(9, 4.2)
    axis = figure.subplots()
    for number, one in enumerate(found.operations):
        look: dict[str, Any] = {"label": one.kind, "color": f"C{number % 10}"}
        if one.layer is None:
            axis.axhline(one.errors[0], linestyle="--", linewidth=0.8, **look)
        else:
            first = max(0, one.layer - one.errors.index(one.error))
            axis.plot(range(first, first + len(one.errors)), one.errors, marker=("o", "s")[number // 10], **look)
    axis.axhline(found.bound, color=RED, linewidth=1, linestyle=":", label="largest by rounding")
    style(axis, "layer", "relative error of the operation")
    axis.set_yscale("symlog", linthresh=found.bound / 1e3)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return image(figure, "operations")
