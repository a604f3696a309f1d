"""Which steps are faults, and which are the cost of a dtype."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from verl_precision.base.dtypes import DTYPES, EXACT
from verl_precision.base.files import table_of
from verl_precision.tools.gap.explain.attribution import Attribution, Part, attribute
from verl_precision.tools.gap.explain.operations import Operations
from verl_precision.tools.gap.explain.routing import Routing, with_routing
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import Variant, reference

FLOOR = 2e-6  # nats: FP32's own rounding of a log-prob


@dataclass(frozen=True)
class Cause:
    """What is known of a cause; `causes.yaml` explains each field."""

    title: str
    remedy: str
    effect: str
    rounding_of: tuple[str, ...] = ()
    most: float = 0.0


_KNOWN = table_of(__file__, "causes.yaml")
CAUSES = {name: Cause(**known) for name, known in _KNOWN.items()}


@dataclass(frozen=True)
class Finding:
    """What is said of one step."""

    variant: Variant
    cause: Cause
    part: Part
    expected: float  # nats: the size that rounding alone would have
    fault: bool  # whether it is more than that
    evidence: str = ""  # what else was seen


@dataclass(frozen=True)
class Result:
    """What was found."""

    chain: list[Variant]  # the variants from rollout to trainer, and with a mixture of experts `routing` at the end
    findings: list[Finding]  # of each step, faults first
    attribution: Attribution  # the gap and its parts, in the order of the path
    bf16_cost: float  # mean |δ| that BF16 makes in the trainer's engine, nats, with the same experts
    operations: dict[str, Operations]  # variant of vLLM -> what its operations do, on one sequence; empty if compiled


def judge(
    job: Explanation, chain: list[Variant], log_probs: Mapping[str, np.ndarray], routing: Routing | None,
    operations: dict[str, Operations], evidence: Mapping[str, str], terms: int,
) -> Result:  # fmt: skip
    """Share the gap among the steps, and judge each; `log_probs` has those of the reference too.

    `terms` is the model's `longest_sum`.
    """
    before, after = (one.name for one in reference(job, chain))
    cost = log_probs[after] - log_probs[before]
    if routing is not None:
        cost = cost - (routing.log_probs[after] - routing.log_probs[before])
    bf16_cost = float(np.nanmean(np.abs(cost)))

    def judged(kept: Collection[str]) -> Result:
        steps, values = chain, [log_probs[one.name] for one in chain]
        if routing is not None:
            steps, values = with_routing(chain, log_probs, routing, kept)
        attribution = attribute(values)
        found = findings(job, steps, attribution, bf16_cost, evidence, terms)
        return Result(steps, found, attribution, bf16_cost, operations)

    # Steps that are no rounding, and then all that are faults: what they do to the choice of experts is their own.
    no_rounding = {cause for cause, known in CAUSES.items() if not known.rounding_of}
    first = judged(no_rounding)
    faults = {each.variant.cause for each in first.findings if each.fault}
    return judged(no_rounding | faults) if routing is not None else first


def longest_sum(described: Mapping[str, Any]) -> int:
    """Return the terms of the longest sum in a model's matrix products, by its `config.json`; 1 if that is silent."""
    inner = described.get("moe_intermediate_size") or described.get("intermediate_size") or 1
    return max(described.get("hidden_size") or 1, inner)


def findings(
    job: Explanation, chain: Sequence[Variant], attribution: Attribution, bf16_cost: float,
    evidence: Mapping[str, str], terms: int,
) -> list[Finding]:  # fmt: skip
    """Judge each step; faults come first, the largest part of the k3 before.

    No rounding excuses a step that stays in exact arithmetic.
    A dtype with n more bits than BF16 is expected to make 2⁻ⁿ of its cost. Of BF16 and FP16 that is all: their products
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
        found.append(Finding(variant, cause, part, expected, fault, evidence.get(variant.cause, "")))
    return sorted(found, key=lambda one: (not one.fault, -one.part.k3))
