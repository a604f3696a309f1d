"""The result of an explanation, in words: a table on the terminal, and JSON."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_precision.cli.verb import say
from verl_precision.mismatch.prediction import LENGTHS, prediction_in_words
from verl_precision.tools.gap.explain.judge import Finding, Result
from verl_precision.tools.gap.settings import Explanation
from verl_precision.tools.show.tables import number_text, percent_text, terminal_table, write_json

FILE = "explanation.json"
_COLUMNS = ("step", "size (nats)", "by rounding", "share of k3", "k3 without", "")


def verdict(job: Explanation, result: Result) -> str:
    """Return the answer in a few sentences: the gap, whether something is wrong, and at which length it matters."""
    lengths = (job.max_response_tokens, LENGTHS[-1])
    matters = " ".join(prediction_in_words(result.attribution.k3, tokens) for tokens in lengths)
    gap = f"Mean |gap| {result.attribution.nats:.2e} nats, k3 {result.attribution.k3:.2e}."
    if faults := [f"{each.variant.cause}: {each.cause.title}" for each in result.findings if each.fault]:
        return f"{gap} Something is wrong. {'; '.join(faults)}. {matters}"
    pair = f"{job.train_dtype} training with a {job.rollout_dtype} rollout"
    return f"{gap} Nothing is wrong: this is what {pair} costs on this model. {matters}"


def rows(result: Result) -> list[tuple[str, ...]]:
    """Return a row for each step, with the cells of `_COLUMNS`, faults first."""
    return [
        (
            f"{each.variant.cause}: {each.variant.words}",
            *map(number_text, (each.part.size, each.expected)),
            percent_text(result.attribution.share(each.part), 1),
            number_text(each.part.without),
            "FAULT" if each.fault else "",
        )
        for each in result.findings
    ]


def advice(result: Result) -> list[Finding]:
    """Return the steps with a remedy: the faults; without faults the largest part, unless its remedy is in use."""
    faults = [each for each in result.findings if each.fault]
    in_use = "precision=fp16" if result.chain[0].dtype == result.chain[-1].dtype == "fp16" else ""
    return faults or [each for each in result.findings[:1] if each.part.k3 > 0 and each.cause.remedy != in_use]


def show(job: Explanation, result: Result, console: Console) -> None:
    """Print verdict, table and remedies."""
    say(verdict(job, result), console)
    faults = {number for number, finding in enumerate(result.findings) if finding.fault}
    console.print(terminal_table(_COLUMNS, rows(result), red=faults))
    for each in advice(result):
        when = "" if each.fault else "Only if this gap is too large: "
        say(f"{when}{each.variant.cause}: {each.cause.remedy}. Effect: {each.cause.effect}.", console)
    if left_out := result.attribution.left_out:
        say(f"{left_out} tokens have no finite log-prob in at least one variant and are left out.", console)


def write(folder: Path, job: Explanation, result: Result, envelope: Mapping[str, Any]) -> None:
    """Write the verdict, the steps and the job's data to `FILE` in a folder."""
    whole = result.attribution
    steps = [
        {
            "cause": each.variant.cause, "what": each.cause.title, "changed": each.variant.words, "fault": each.fault,
            "size_nats": each.part.size, "expected_nats": each.expected, "nats": each.part.nats, "k3": each.part.k3,
            "k3_without": each.part.without, "share": whole.share(each.part), "equal_fraction": each.part.equal,
            "remedy": each.cause.remedy, "effect": each.cause.effect,
        }
        for each in result.findings
    ]  # fmt: skip
    content = {
        **{"verdict": verdict(job, result), "nats": whole.nats, "k3": whole.k3, "tokens": whole.tokens},
        **{"tokens_left_out": whole.left_out, "bf16_cost": result.bf16_cost, "steps": steps},
        **{"path": [one.name for one in result.chain], **envelope, "command": shlex.join(envelope["command"])},
    }
    write_json(folder / FILE, content)
