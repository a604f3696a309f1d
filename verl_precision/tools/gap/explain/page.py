"""The result of an explanation: a table on the terminal, JSON, and one HTML page with a waterfall of the parts."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from verl_precision.base.files import write_file
from verl_precision.base.terminal import paragraph
from verl_precision.tools.gap.explain.judge import FLOOR, Finding, Result
from verl_precision.tools.gap.explain.operations import FAMILIES, Operations
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.show.colours import COLOURS, RED
from verl_precision.tools.show.figures import image, new_figure, style
from verl_precision.tools.show.pages import render
from verl_precision.tools.show.tables import percent_text, short_text, terminal_table, write_json

_WIDTH = 5.2  # of a figure, in inches: letters of 10 points are still read where a page is 400 pixels wide
FILES = ("explanation.json", "explanation.html")
_COLUMNS = ("step", "change", "size (nats)", "by rounding", "part of |gap|", "share of k3", "k3 without", "")


def verdict(job: Explanation, result: Result) -> str:
    """Return the answer in a sentence or two."""
    faults = [finding for finding in result.findings if finding.fault]
    gap = f"Mean |gap| {result.attribution.nats:.2e} nats, k3 {result.attribution.k3:.2e}."
    if job.through_exact:
        (equal,) = (each.part.equal for each in result.findings if each.variant.cause == "engine")
        tokens = result.attribution.tokens
        gap += f" In exact arithmetic both engines give {equal * tokens:.0f} of {tokens} tokens equal log-probs."
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
            short_text(each.part.size), short_text(each.expected), short_text(each.part.nats),
            percent_text(share(each.part), 1), short_text(each.part.without), "FAULT" if each.fault else "",
        )
        for each in result.findings
    ]  # fmt: skip


def advice(result: Result) -> list[Finding]:
    """Return the steps against which something should be done: the faults, or else the largest cost of a dtype."""
    faults = [each for each in result.findings if each.fault]
    return faults or [each for each in result.findings if each.part.k3 > 0][:1]


def place_of(result: Result, name: str) -> str:
    """Return in words where the operations of a variant of vLLM were recorded."""
    variant = next(one for one in result.chain if one.name == name)
    return variant.words if variant.words.startswith("vLLM") else f"vLLM in {variant.dtype}, {variant.words}"


def operations_text(found: Operations) -> str:
    """Return in a sentence or two how much the operations of a place add."""
    if not found.operations:
        return f"not compared. It takes a model of type {', '.join(FAMILIES)}, and a vLLM not compiled."
    alike = "each is exact, to the last bit" if found.exact else "each differs by rounding alone"
    first = f"the first that differs is {found.first}" if found.first else alike
    most = ", ".join(f"{one.kind} {percent_text(one.share)}" for one in found.operations[:4] if one.share > 0)
    if found.first is None and found.nats < FLOOR:  # shares of nothing
        return f"{first}."
    return f"{first}. They add most: {most or 'nothing'}."


def show(job: Explanation, result: Result, console: Console) -> None:
    """Print verdict, table and remedies."""

    def say(text: str, **how: Any) -> None:
        console.print(paragraph(text, console), soft_wrap=True, highlight=False, **how)

    say(verdict(job, result))
    faults = {number for number, finding in enumerate(result.findings) if finding.fault}
    narrow = [(f"{step}: {changed}", *numbers) for step, changed, *numbers in rows(result)]
    console.print(terminal_table(("step: what is changed", *_COLUMNS[2:]), narrow, red=faults))
    for variant, found in result.operations.items():
        say(f"Operations of {place_of(result, variant)}: {operations_text(found)}")
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
                "share": whole.share(each.part), "equal_fraction": each.part.equal,
                "evidence": each.evidence, "remedy": each.cause.remedy, "effect": each.cause.effect,
            }
            for each in result.findings
        ],
        "operations": {name: asdict(found) for name, found in result.operations.items()},
        "path": [one.name for one in result.chain],
        **envelope,
        "command": shlex.join(envelope["command"]),
    }  # fmt: skip
    write_json(folder / "explanation.json", content)
    compared = [(place_of(result, name), found) for name, found in result.operations.items() if found.operations]
    operations = [(place, found, operations_text(found), _by_layer(found)) for place, found in compared]
    page = render(
        "gap/explain/page.html", "explain", content=content, model=job.model, columns=_COLUMNS, rows=rows(result),
        advice=advice(result), operations=operations, waterfall=_waterfall(result),
    )  # fmt: skip
    write_file(folder / "explanation.html", page, replace=True)


def _waterfall(result: Result) -> str:
    """Draw the parts of the k3 from the rollout to the trainer: each bar begins where the one before ends."""
    faults = {each.variant.name for each in result.findings if each.fault}
    parts, start = result.attribution.parts, 0.0
    figure = new_figure(_WIDTH, 0.36 * len(parts) + 1.4)
    axis = figure.subplots()
    for row, (variant, part) in enumerate(zip(result.chain[1:], parts, strict=True)):
        axis.barh(row, part.k3, left=start, color=COLOURS[variant.name in faults])
        share = percent_text(result.attribution.share(part))
        end = (max(start, start + part.k3), row)
        axis.annotate(share, end, xytext=(4, 0), textcoords="offset points", va="center")
        start += part.k3
    axis.barh(len(parts), result.attribution.k3, color=COLOURS[-1])
    axis.set_yticks(range(len(parts) + 1), [variant.cause for variant in result.chain[1:]] + ["the whole gap"])
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.ticklabel_format(axis="x", useMathText=True)
    axis.tick_params(axis="y", length=0)  # beside 0% it would be a sign
    style(axis, "k3 (nats a token)", grid=False)
    return image(figure, "waterfall")


def _by_layer(found: Operations) -> str:
    """Draw the relative error of each kind of operation in each layer: larger is darker, and red is beyond rounding.

    The first column, –, is of operations outside of the layers. A zero is white, a kind that a layer has not is grey.
    """
    errors = np.maximum(np.array([one.errors for one in found.operations], float), np.finfo(float).tiny)
    figure = new_figure(_WIDTH, 0.26 * len(errors) + 1.6)
    axis = figure.subplots()
    blues = LinearSegmentedColormap.from_list("errors", ["white", COLOURS[0]])
    shades = blues.with_extremes(bad="#eceef0", under="white", over=RED)
    norm = LogNorm(found.bound / 1e3, found.bound)
    mesh = axis.pcolormesh(errors, cmap=shades, norm=norm, edgecolors="#e4e5e7", linewidth=0.5)
    columns = [0, *range(1, errors.shape[1], math.ceil(errors.shape[1] / 8))]
    axis.set_xticks([column + 0.5 for column in columns], [str(column - 1) if column else "–" for column in columns])
    axis.set_yticks(np.arange(len(errors)) + 0.5, [one.kind for one in found.operations])
    axis.invert_yaxis()
    style(axis, "layer (–: outside of the layers)", grid=False)
    label = "relative error; red: more than rounding makes"
    figure.colorbar(mesh, ax=axis, location="bottom", extend="max", aspect=40, label=label)
    return image(figure, "operations")
