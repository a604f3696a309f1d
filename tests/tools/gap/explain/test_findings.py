"""What is more than rounding is a fault, faults come first, and a healthy pair is called healthy."""

import pytest

from verl_precision.tools.gap.explain.attribution import Attribution, Part
from verl_precision.tools.gap.explain.judge import Result, findings
from verl_precision.tools.gap.explain.page import advice, rows, verdict
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants

JOB = Explanation(model="m", prompts="p")
COST = 1e-2  # of BF16


def judged(job=JOB, bf16_cost=COST, **sizes):
    """Return the result for steps of given sizes; k3 is the square of a size."""
    chain = variants(job)
    of = [sizes.get(one.cause, 0.0) for one in chain[1:]]
    parts = tuple(Part(nats=size, k3=size**2, size=size, without=0.0) for size in of)
    attribution = Attribution(parts, sum(p.nats for p in parts), sum(p.k3 for p in parts), 100, 0)
    found = findings(job, chain, attribution, bf16_cost, {"weights": "1 of 3 tensors differs"})
    return Result(chain, found, attribution, bf16_cost, {})


def test_rounding_is_no_fault():
    result = judged(rollout_precision=1.2 * COST, trainer_precision=COST, layout=0.5 * COST, engine=1e-6)
    assert not any(each.fault for each in result.findings)
    assert "Nothing is wrong: this is what bf16 training with a bf16 rollout costs" in verdict(JOB, result)
    assert [each.variant.cause for each in advice(result)] == ["rollout_precision"]


@pytest.mark.parametrize(
    ("job", "cause", "size"),
    [
        ({}, "decode", 3 * COST),
        ({}, "rollout_precision", 3 * COST),
        ({}, "engine", 1e-4),  # far below the cost of BF16, and yet no rounding
        ({"rollout_model": "older"}, "weights", 1e-4),
        ({"top_p": 0.9}, "sampling", 1e-4),
        ({"fp32_log_probs": False}, "log_probs", 0.6 * COST),
        ({"attention": "eager"}, "attention", 3 * COST),
        ({"train_dtype": "fp16", "rollout_dtype": "fp16"}, "layout", 3 * COST / 8),
        ({"train_dtype": "fp16"}, "weight_rounding", 3 * COST),
    ],
)
def test_more_than_rounding_is_a_fault_and_comes_first(job, cause, size):
    job = Explanation(model="m", prompts="p", **job)
    result = judged(job, trainer_precision=COST / 8, **{cause: size})
    assert [(each.variant.cause, each.fault) for each in result.findings][0] == (cause, True)
    assert sum(each.fault for each in result.findings) == 1
    assert cause in verdict(job, result) and "Something is wrong" in verdict(job, result)
    assert rows(result)[0][-1] == "FAULT"
    below = judged(job, trainer_precision=COST / 8, **{cause: size / 100})
    assert not any(each.fault for each in below.findings)


def test_two_faults_are_both_named():
    result = judged(engine=1e-3, layout=5 * COST)
    assert [each.variant.cause for each in result.findings[:2]] == ["layout", "engine"]
    assert len(advice(result)) == 2
