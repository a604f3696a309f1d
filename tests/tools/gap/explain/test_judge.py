"""One change a variant; parts add up to the gap, token by token; more than rounding is a fault, and comes first."""

from dataclasses import fields

import numpy as np
import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from verl_precision.tools.gap.explain import judge
from verl_precision.tools.gap.explain.judge import Attribution, Part, Result, attribute, longest_sum, verdict
from verl_precision.tools.gap.explain.variants import reference, variants
from verl_precision.tools.jobs.settings import Explanation

LOG_PROBS = arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 20)), elements=st.floats(-30, 0))
JOB = Explanation(model="m", prompts="p")
COST = 1e-2  # of BF16


@given(LOG_PROBS)
def test_parts_add_up(log_probs_KN):
    found = attribute(list(log_probs_KN))
    gap = log_probs_KN[-1] - log_probs_KN[0]
    assert sum(part.nats for part in found.parts) == pytest.approx(found.nats, abs=1e-9)
    assert found.nats == pytest.approx(np.abs(gap).mean())
    assert sum(part.k3 for part in found.parts) == pytest.approx(found.k3, rel=1e-6, abs=1e-12)
    assert found.k3 == pytest.approx(np.mean(np.expm1(gap) - gap), rel=1e-6, abs=1e-9)
    assert found.tokens == len(gap) and found.left_out == 0


def test_by_hand():
    # g = (0.3, -0.1): steps (0.2, 0.1) and (0.1, -0.2)
    found = attribute([np.array([-1.0, -2.0]), np.array([-0.8, -1.9]), np.array([-0.7, -2.1])])
    first, second = found.parts
    assert (first.nats, second.nats) == pytest.approx(((0.2 - 0.1) / 2, (0.1 + 0.2) / 2))
    assert (first.size, second.size) == pytest.approx((0.15, 0.15))
    k3 = [np.expm1(g) - g for g in (0.3, -0.1)]
    assert first.k3 == pytest.approx((0.2 / 0.3 * k3[0] + 0.1 / -0.1 * k3[1]) / 2)
    assert found.share(first) + found.share(second) == pytest.approx(1)
    # Without a step, the other one is the gap.
    without = [np.mean([np.expm1(g) - g for g in other]) for other in ((0.1, -0.2), (0.2, 0.1))]
    assert (first.without, second.without) == pytest.approx(tuple(without))


def test_independent_steps_have_shares_of_the_variance():
    rng = np.random.default_rng(0)
    steps = rng.normal(0, [[1e-3], [2e-3]], (2, 200_000))
    found = attribute([np.zeros(200_000), steps[0], steps.sum(0)])
    assert [found.share(part) for part in found.parts] == pytest.approx([1 / 5, 4 / 5], abs=0.01)


def test_tokens_that_are_not_finite_are_left_out_and_counted():
    found = attribute([np.array([-1.0, -1.0, -1.0]), np.array([-1.0, np.nan, -1.5]), np.array([-np.inf, -1.0, -1.5])])
    assert (found.tokens, found.left_out, found.nats) == (1, 2, 0.5)
    none, equal = attribute([np.array([np.nan]), np.array([-1.0])]), attribute([np.full(4, -1.0)] * 3)
    assert (none.tokens, none.left_out, none.nats, none.k3, none.share(none.parts[0])) == (0, 1, 0, 0, 0)
    assert equal.nats == equal.k3 == 0 and all(equal.share(part) == 0 for part in equal.parts)


def judged(job=JOB, bf16_cost=COST, terms=128, **sizes):
    """Return the result for steps of given sizes; k3 is the square of a size."""
    chain = variants(job)
    of = [sizes.get(one.cause, 0.0) for one in chain[1:]]
    parts = tuple(Part(nats=size, k3=size**2, size=size, without=0.0, equal=float(not size)) for size in of)
    attribution = Attribution(parts, sum(p.nats for p in parts), sum(p.k3 for p in parts), 100, 0)
    found = judge.findings(job, chain, attribution, bf16_cost, terms)
    return Result(chain, found, attribution, bf16_cost)


def test_rounding_is_no_fault():
    result = judged(rollout_precision=1.2 * COST, trainer_precision=COST, layout=0.5 * COST, engine=1e-6)
    assert not any(each.fault for each in result.findings)
    assert "Nothing is wrong: this is what bf16 training with a bf16 rollout costs" in verdict(JOB, result)
    assert [each.variant.cause for each in judge.advice(result)] == ["rollout_precision"]
    in_fp16 = Explanation(model="m", prompts="p", train_dtype="fp16", rollout_dtype="fp16")
    assert judge.advice(judged(in_fp16, rollout_precision=COST / 8)) == [], "its remedy is in use"


@pytest.mark.parametrize(("job", "cause", "size"), [
    ({}, "decode", 3 * COST),
    ({}, "rollout_precision", 3 * COST),
    ({}, "engine", 1e-4),  # far below the cost of BF16, and yet no rounding
    ({"rollout_model": "older"}, "weights", 1e-4),
    ({"top_p": 0.9}, "sampling", 1e-4),
    ({"fp32_log_probs": False}, "log_probs", 0.6 * COST),
    ({"attention": "eager"}, "attention", 3 * COST),
    ({"train_dtype": "fp16", "rollout_dtype": "fp16"}, "layout", 3 * COST / 8),
    ({"train_dtype": "fp16"}, "weight_rounding", 3 * COST),
])  # fmt: skip
def test_more_than_rounding_is_a_fault_and_comes_first(job, cause, size):
    job = Explanation(model="m", prompts="p", **job)
    result = judged(job, trainer_precision=COST / 8, **{cause: size})
    assert [(each.variant.cause, each.fault) for each in result.findings][0] == (cause, True)
    assert sum(each.fault for each in result.findings) == 1
    assert cause in verdict(job, result) and "Something is wrong" in verdict(job, result)
    assert judge.rows(result)[0][-1] == "FAULT"
    below = judged(job, trainer_precision=COST / 8, **{cause: size / 100})
    assert not any(each.fault for each in below.findings)


def test_fp32_sums_round_at_every_term():
    """SmolLM2-135M (sums of 1,536 terms): two right engines lay 7.9e-6 nats apart, 17 times FP32's single rounding."""
    fp32, known = 7.9e-6 / 17, {"hidden_size": 576, "intermediate_size": 1536}
    model = {"bf16_cost": fp32 * 2**16, "terms": longest_sum(known)}
    bar = 1.7 * 1536**0.5 * fp32
    assert longest_sum(known) == 1536 and 3 < bar / 7.9e-6 < 5, "a healthy engine is far from the bar"
    assert not any(each.fault for each in judged(**model, engine=7.9e-6).findings)
    assert [each.fault for each in judged(**model, engine=1.1 * bar).findings][0], "a fault is a thousand times it"
    both_fp32 = Explanation(model="m", prompts="p", train_dtype="fp32", rollout_dtype="fp32")
    assert not any(each.fault for each in judged(both_fp32, **model, layout=7.9e-6, batch=7.9e-6).findings)
    experts = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    assert (longest_sum(experts), longest_sum({})) == (2048, 1)


WHOLE = {
    "rollout_model": "tiny:llama", "rollout_dtype": "fp16", "train_dtype": "bf16", "top_p": 0.8, "packed": True,
    "attention": "flash_attention_2", "fp32_log_probs": False, "fp32_output_head": True, "prefix_caching": True,
    "cuda_graphs": True,
}  # fmt: skip
RAW = {"raw_log_probs": True, "temperature": 0.8, "top_p": 0.8}
ELSEWHERE = {"routing", "temperature"}  # causes that the whole path has not


def job(**changes):
    return Explanation(model="tiny:qwen3", prompts="built-in", **changes)


def test_whole_path():
    chain = variants(job(**WHOLE))
    assert [one.cause for one in chain[1:]] == [cause for cause in judge.CAUSES if cause not in ELSEWHERE]
    assert len({one.name for one in chain}) == len(chain)
    plain = [one.cause for one in variants(job(rollout_dtype="fp32", train_dtype="fp32"))[1:]]
    assert plain == ["decode", "batch", "engine", "layout"]


def test_no_rounding_excuses_a_step_in_exact_arithmetic():
    exact = job(arithmetic="exact")
    chain = variants(exact)
    assert {(one.arithmetic, one.dtype) for one in chain} == {("exact", "bf16")}
    before, after = reference(exact, chain)
    assert (before.dtype, after.dtype, after in chain) == ("fp32", "bf16", True)
    for cause in ("decode", "batch", "engine", "layout"):
        assert [e.variant.cause for e in judged(exact, **{cause: 1e-5}).findings if e.fault] == [cause]


def test_raw_log_probs_know_neither_temperature_nor_truncation():
    chain = variants(job(**RAW))
    assert [one.cause for one in chain[1:]][:2] == ["temperature", "decode"]
    assert [(one.tempered, one.processed) for one in chain[:3]] == [(False, False), (True, False), (True, True)]
    assert "temperature" not in {one.cause for one in variants(job(raw_log_probs=True))}, "there is nothing to divide"


@pytest.mark.parametrize("case", [
    {}, WHOLE, RAW, {"arithmetic": "exact", "packed": True}, {"train_dtype": "fp32"},
    {"rollout_dtype": "fp32", "top_k": 5},
])  # fmt: skip
def test_neighbours_differ_in_what_the_cause_says(case):
    chain = variants(job(**case))
    may_change = cases(__file__, "may_change")
    for before, after in zip(chain, chain[1:], strict=False):
        changed = {f.name for f in fields(after) if getattr(before, f.name) != getattr(after, f.name)}
        assert changed - {"name", "cause", "words"} <= {*may_change[after.cause]}, after.name


@pytest.mark.parametrize("train", ["bf16", "fp16", "fp32"])
def test_reference_has_bf16_and_nothing_else(train):
    chain = variants(job(train_dtype=train, rollout_dtype="fp16"))
    before, after = reference(job(train_dtype=train, rollout_dtype="fp16"), chain)
    assert (before.dtype, after.dtype, before.engine, after.engine) == ("fp32", "bf16", "trainer", "trainer")
    assert (after in chain) == (train == "bf16")
