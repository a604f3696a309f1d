"""Divides a gap among the steps of a path, finds faults, which are not the cost of a dtype, and gives the answer.

In a mixture of experts the effect of another choice of experts is a separate cause (`routing` in docs/gap.md). H(R) are
the log-probs of the trainer's engine in FP32 with choices R. If a step changes the choices from R to R', the difference
H(R') - H(R) is moved from that step to the step `routing`. Only a step that is a fault keeps its difference.
"""

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from verl_precision.base.dtypes import DTYPES, EXACT
from verl_precision.base.files import table_of
from verl_precision.cli.verb import say
from verl_precision.mismatch.prediction import LENGTHS, prediction_in_words
from verl_precision.tools.gap.explain.variants import Variant, reference
from verl_precision.tools.jobs.settings import Explanation
from verl_precision.tools.show.tables import number_text, percent_text, terminal_table, write_json

FILE = "explanation.json"
_COLUMNS = ("step", "size (nats)", "by rounding", "share of k3", "k3 without", "")
FLOOR = 2e-6  # nats: FP32's own rounding of a log-prob
_SMALL = 1e-6  # below this gap k3(g)/g is g/2 to nine digits


@dataclass(frozen=True)
class Cause:
    """A cause; `causes.yaml` explains each field."""

    title: str
    remedy: str
    effect: str
    rounding_of: tuple[str, ...] = ()
    most: float = 0.0


CAUSES = {name: Cause(**known) for name, known in table_of(__file__, "causes.yaml").items()}


@dataclass(frozen=True)
class Part:
    """The effect of one step of the path."""

    nats: float  # its part of the mean |g|, nats; negative if it cancels other steps
    k3: float  # its part of the k3
    size: float  # its own mean |δ|, nats, whatever the other steps are
    without: float  # the k3 that would remain without this step
    equal: float  # the share of the tokens whose log-prob it does not change, to the last bit


@dataclass(frozen=True)
class Attribution:
    """A gap and its parts, in the order of the path."""

    parts: tuple[Part, ...]
    nats: float  # mean |g|
    k3: float  # mean of e^g - 1 - g: KL(μ‖π) per token
    tokens: int
    left_out: int  # tokens without a finite log-prob in some variant

    def share(self, part: Part) -> float:
        """Return a part's share of the k3; 0 where there is no gap."""
        return part.k3 / self.k3 if self.k3 else 0.0


@dataclass(frozen=True)
class Finding:
    """The verdict on one step."""

    variant: Variant
    cause: Cause
    part: Part
    expected: float  # nats: the size that rounding alone would have
    fault: bool  # whether the size is more than rounding explains


@dataclass(frozen=True)
class Result:
    """The result of an explanation."""

    chain: list[Variant]  # the variants from rollout to trainer, and with a mixture of experts `routing` at the end
    findings: list[Finding]  # of each step, faults first
    attribution: Attribution
    bf16_cost: float  # mean |δ| of BF16 in the trainer's engine, nats, with the same experts


LogProbs = Mapping[str, np.ndarray]  # variant -> log-probs of all tokens, nats


def attribute(log_probs: Sequence[np.ndarray]) -> Attribution:
    """Share the gap g = ℓ_K - ℓ_0 of each token among the steps δ_i = ℓ_i - ℓ_{i-1}, whose sum it is.

    A step's part of |g| is δ_i sign(g), and of k3(g) = e^g - 1 - g it is δ_i k3(g)/g. The parts of each token
    sum to the whole, and so do their means. Where steps are small and independent, k3(g)/g ≈ g/2 makes the part
    E[δ_i g]/2, to which only δ_i² contributes: parts are shares of the variance. The log-probs ℓ_0 to ℓ_K, float64 [N]
    each, are in nats. Tokens with a value that is not finite are left out, and counted.
    """
    log_probs_KN = np.stack(log_probs)
    finite_N = np.isfinite(log_probs_KN).all(axis=0)
    log_probs_KN = log_probs_KN[:, finite_N]
    steps_KN = np.diff(log_probs_KN, axis=0)
    gap_N = log_probs_KN[-1] - log_probs_KN[0]
    small_N = np.abs(gap_N) < _SMALL
    slope_N = np.where(small_N, gap_N / 2, _k3(gap_N) / np.where(small_N, 1, gap_N))
    tokens = max(gap_N.size, 1)
    columns = (
        steps_KN @ np.sign(gap_N),
        steps_KN @ slope_N,
        np.abs(steps_KN).sum(axis=1),
        _k3(gap_N - steps_KN).sum(axis=1),
        (steps_KN == 0).sum(axis=1),
    )
    parts = tuple(Part(*of_step) for of_step in (np.stack(columns, axis=1) / tokens).tolist())
    nats, k3 = float(np.abs(gap_N).sum() / tokens), float((gap_N * slope_N).sum() / tokens)
    return Attribution(parts, nats, k3, gap_N.size, int((~finite_N).sum()))


def _k3(gap: np.ndarray) -> np.ndarray:
    """Return e^g - 1 - g with nine digits, also for small gaps, where the terms cancel."""
    return np.where(np.abs(gap) < _SMALL, gap * gap / 2, np.expm1(gap) - gap)


def judge(job: Explanation, chain: list[Variant], log_probs: LogProbs, routing: LogProbs | None, terms: int) -> Result:
    """Share the gap among the steps, and judge each step; `log_probs` also has those of the reference.

    `routing` has the log-probs H of each variant's choices of experts, and `terms` is the model's `longest_sum`.
    """
    before, after = (one.name for one in reference(job, chain))
    cost = log_probs[after] - log_probs[before]
    if routing is not None:
        cost = cost - (routing[after] - routing[before])
    bf16_cost = float(np.nanmean(np.abs(cost)))

    def judged(kept: Collection[str]) -> Result:
        steps, values = chain, [log_probs[one.name] for one in chain]
        if routing is not None:
            steps, values = with_routing(chain, log_probs, routing, kept)
        attribution = attribute(values)
        return Result(steps, findings(job, steps, attribution, bf16_cost, terms), attribution, bf16_cost)

    # Steps that are not rounding keep their effect on the choice of experts; in the second pass all faults keep it too.
    no_rounding = {cause for cause, known in CAUSES.items() if not known.rounding_of}
    first = judged(no_rounding)
    faults = {each.variant.cause for each in first.findings if each.fault}
    return judged(no_rounding | faults) if routing is not None else first


def with_routing(
    chain: Sequence[Variant], log_probs: LogProbs, routing: LogProbs, kept: Collection[str]
) -> tuple[list[Variant], list[np.ndarray]]:
    """Move the effect of other choices of experts from the steps into a step of its own; return path and log-probs.

    Steps of the causes `kept` keep this effect: other weights choose other experts, and that is not rounding.
    """
    moved = np.zeros_like(log_probs[chain[0].name])
    found = [log_probs[chain[0].name]]
    for before, after in pairwise(chain):
        if after.cause not in kept:
            moved = moved + routing[after.name] - routing[before.name]
        found.append(log_probs[after.name] - moved)
    step = replace(chain[-1], name="routed", cause="routing", words="with its own choice of experts")
    return [*chain, step], [*found, log_probs[chain[-1].name]]


def longest_sum(described: Mapping[str, Any]) -> int:
    """Return the terms of the longest sum in a model's matrix products, by its `config.json`; 1 if unknown."""
    inner = described.get("moe_intermediate_size") or described.get("intermediate_size") or 1
    return max(described.get("hidden_size") or 1, inner)


def findings(
    job: Explanation, chain: Sequence[Variant], attribution: Attribution, bf16_cost: float, terms: int
) -> list[Finding]:
    """Judge each step; faults come first, and in both groups the largest part of the k3.

    Rounding does not explain a step that stays in exact arithmetic.
    A dtype with n more bits than BF16 is expected to have 2⁻ⁿ of BF16's cost. For BF16 and FP16 that is all: products
    are summed in FP32, and rounded once. FP32's own sums are rounded at every term, and the errors of K terms add up
    like a random walk's, to √K times one rounding (Higham and Mary 2019, doi:10.1137/18M1226312); K is `terms`.
    """
    dtypes = {"rollout": job.rollout_dtype, "trainer": job.train_dtype, "neither": "fp32"}
    found = []
    for (before, variant), part in zip(pairwise(chain), attribution.parts, strict=True):
        cause = CAUSES[variant.cause]
        sides = () if before.arithmetic == variant.arithmetic == EXACT else cause.rounding_of
        bits = [DTYPES[dtypes[side]].bits for side in sides]
        expected = bf16_cost * 2.0 ** (DTYPES["bf16"].bits - min(bits)) if bits else 0.0
        if bits and min(bits) == DTYPES["fp32"].bits:
            expected *= math.sqrt(terms)
        fault = part.size > max(cause.most * expected, FLOOR)
        found.append(Finding(variant, cause, part, expected, fault))
    return sorted(found, key=lambda one: (not one.fault, -one.part.k3))


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
