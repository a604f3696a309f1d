"""The findings of `explain` with made-up engines, other choices of experts among them; with jobs/test_contract.py."""

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from kept_responses import response
from made_up import bf16_rounds, two_tokens
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.judge import Routing, judge
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import REPLAYED, variants
from verl_precision.tools.kept_tokens.kept_file import append


@pytest.fixture
def explain(tmp_path, made_up):
    def run(**changes):
        job, shown = Explanation(output=tmp_path / "job", **{"max_prompts": 3, **changes}), io.StringIO()
        result = session.explain(job, Console(file=shown, width=160))
        return result, shown.getvalue(), json.loads((tmp_path / "job" / "explanation.json").read_text())

    return run


def test_healthy_pair(explain, made_up, tmp_path):
    result, shown, content = explain()
    assert "Nothing is wrong" in shown and "FAULT" not in shown
    assert result.bf16_cost == pytest.approx(0.01, rel=1e-5)
    # One process for what the same engine can compute: vLLM in BF16 and FP32, the trainer in FP32 and BF16.
    counts = {"rollout": 9, "rollout_fp32": 3, "engine_fp32": 3, "trainer_alone": 6}
    assert Counter(name for name, _, _ in made_up.seen) == counts
    left = [left for name, left, _ in made_up.seen if name == "rollout"]
    assert left == [2, 1, 0, 2, 1, 0, 0, 0, 0], "the last three alone"
    assert {file.name for file in (tmp_path / "job").iterdir()} == {"explanation.json", "journal.jsonl"}
    assert content["verdict"].startswith("Mean |gap|") and len(content["steps"]) == len(content["path"]) - 1
    assert sum(step["k3"] for step in content["steps"]) == pytest.approx(content["k3"])


def test_exact_arithmetic_between_the_engines(explain, made_up):
    result, shown, content = explain(exact=True)
    assert result.bf16_cost == pytest.approx(0.01, rel=1e-5)
    assert "both engines give 6 of 6 tokens equal log-probs. Nothing is wrong" in shown
    counts = {"rollout": 9, "rollout_exact": 3, "engine_exact": 3, "reference_fp32": 3, "trainer_alone": 6}
    assert Counter(name for name, _, _ in made_up.seen) == counts
    assert {step["cause"]: step["equal_fraction"] for step in content["steps"]}["engine"] == 1


def test_fault_between_the_engines(explain, made_up):
    def wrong(name):
        return (-1.2, -2.0) if name.startswith("rollout") else bf16_rounds(name)

    made_up.answer = partial(two_tokens, log_probs=wrong)
    result, shown, _ = explain()
    assert result.findings[0].variant.cause == "engine" and result.findings[0].fault
    assert "Something is wrong. engine: the two engines do not compute the same function" in shown


def test_tokens_that_a_second_drawing_changes_are_left_out(explain, made_up):
    def other_second_token(name, request):
        answer = two_tokens(name, request)
        return replace(answer, token_ids=(answer.token_ids[0], 8)) if name == "untruncated" else answer

    made_up.answer = other_second_token
    result, shown, _ = explain(top_p=0.8)
    assert (result.attribution.tokens, result.attribution.left_out) == (3, 3)
    assert "3 tokens have no finite log-prob" in shown


def test_a_fault_keeps_what_it_does_to_the_choices():
    """Other weights choose other experts, and so does a wrong kernel: neither is a fault of the routers."""
    job = Explanation(model="m", prompts="p", rollout_model="older")
    chain = variants(job, routed=True)
    rounding = {"weights": 0.2, "decode": 0.1, "rollout_precision": 0.01, "trainer_precision": 0.01}
    routing = {"weights": 0.4, "decode": 0.3, "rollout_precision": 0.002}
    signs = np.array([1.0, -1.0])

    def along(*steps):
        sizes = [sum(step.get(one.cause, 0.0) for step in steps) for one in chain]
        return dict(zip((one.name for one in chain), np.cumsum(sizes)[:, None] * signs, strict=True))

    found = judge(job, chain, along(rounding, routing), Routing(along(routing), 0.1), {}, 128)
    sizes = {"weights": 0.6, "decode": 0.4, "rollout_precision": 0.01, "trainer_precision": 0.01, "routing": 0.002}
    assert {each.variant.cause: round(each.part.size, 6) for each in found.findings if each.part.size} == sizes
    assert {each.variant.cause for each in found.findings if each.fault} == {"weights", "decode"}


def choosing(other):
    """Return answers: vLLM chooses experts 0 and 1, in BF16 it and the trainer 1 and `other`; 2 takes 0.3 nats."""

    def answer(name, request):
        drawn = None if request.response_token_ids else (5, 7)
        experts = np.zeros((len(request.prompt_token_ids) + 1, 1, 2), np.int16)  # without the last of two tokens
        experts[:] = (1, 0) if name in ("rollout", "rollout_fp32", "engine_fp32") else (other, 1)
        if request.routed_experts is not None:
            assert request.routed_experts.shape == experts.shape
            experts = request.routed_experts
        rounding = 0.01 if name in ("rollout", "trainer_alone", "trainer") else 0.0
        value = -1.0 + rounding - 0.3 * (experts[-1] == 2).any()
        said = None if name == REPLAYED else experts
        return replace(two_tokens(name, request), token_ids=drawn, log_probs=(value, -2.0), routed_experts=said)

    return answer


@pytest.mark.parametrize(("other", "cost", "changed"), [(2, 0.3, 0.5), (0, 0.0, 0.0)])
def test_other_choices_are_a_cause(explain, made_up, other, cost, changed):
    made_up.answer = choosing(other)
    result, _, _ = explain(model="tiny:qwen3_moe", packed=True)
    routing = next(each for each in result.findings if each.variant.cause == "routing")
    assert routing.part.size == pytest.approx(cost / 2, abs=1e-6), "the first of two tokens"
    assert routing.evidence == f"{changed:.2%} of the choices differ between rollout and trainer"
    assert routing.fault == (cost > 0) and (not cost or result.findings[0] is routing)
    by_cause = {each.variant.cause: each.part.size for each in result.findings}
    assert by_cause["trainer_precision"] == pytest.approx(0.005, abs=1e-6), "rounding is what it is without them"
    assert result.bf16_cost == pytest.approx(0.005, abs=1e-6)
    replays = [request for name, request in made_up.requests if name == REPLAYED]
    assert len(replays) == (6 if cost else 0), "of two variants of the trainer; a set has no order"


def kept(step: int = 1, seed: int = 0, **changes):
    """A response of two tokens: a made-up engine gives -1.01 and -1.99 in BF16, and the run has said -1.02 and -2."""
    fields = {
        "token_ids": np.array([5, 7], "i4"), "prompt_ids": np.array([1, 2, 3], "i4"), "mask": np.ones(2, "u1"),
        "rollout_log_probs": np.array([-1.02, -2.0], "f4"),
    }  # fmt: skip
    return response(step, 2, seed=seed, **{**fields, **changes})


@pytest.fixture
def explain_kept(explain, tmp_path):
    def run(*responses, **changes):
        if responses:
            append(tmp_path / "kept_tokens", responses)
        return explain(tokens=str(tmp_path / "kept_tokens"), **{"max_prompts": None, **changes})[0]

    return run


def test_the_runs_tokens_are_scored_and_none_is_drawn(explain_kept, made_up, tmp_path):
    """Tool output has nothing to compare with."""
    tool = kept(seed=1, mask=np.array([1, 0], "u1"), rollout_log_probs=np.array([-1.02, np.nan], "f4"))
    result = explain_kept(kept(), tool, kept(2))
    asked = [request for _, request in made_up.requests]
    assert asked and all(request.response_token_ids == (5, 7) for request in asked)
    assert {(request.problem, request.prompt_token_ids) for request in asked} == {("0", (1, 2, 3)), ("1", (1, 2, 3))}
    lines = [json.loads(line) for line in (tmp_path / "job" / "journal.jsonl").read_text().splitlines()[1:]]
    drawn = [line for line in lines if line.get("rollout") == "rollout" and line.get("token_ids")]
    assert drawn[0]["log_probs"] == [float(f"{np.float32(-1.02):.9g}"), -2.0], "as the run said"
    assert (result.attribution.tokens, result.attribution.left_out) == (3, 1)
    by_cause = {finding.variant.cause: finding.part.size for finding in result.findings}
    assert by_cause["decode"] == pytest.approx(0.01, rel=1e-4), "0.01 at each token"
    explain_kept()
    assert len(made_up.requests) == len(asked), "the same command goes on, and everything is there"


def test_a_step_is_chosen_and_long_responses_are_cut(explain_kept, made_up):
    made_up.answer = lambda name, request: replace(two_tokens(name, request), length=1, log_probs=(-1.0,))
    explain_kept(kept(1), kept(2, token_ids=np.array([8, 9], "i4")), step=2, max_response_tokens=1, max_prompts=1)
    assert {request.response_token_ids for _, request in made_up.requests} == {(8,)}


@pytest.mark.parametrize(("responses", "changes", "message"), [
    ([kept()], {"step": 7}, "--step 7: no response of it was kept. Allowed: 1"),
    ([kept()], {"model": "tiny:qwen3_moe"}, "which experts computed its tokens"),
    ([kept(token_ids=np.array([5, 999_999], "i4"))], {}, r"token 999999 is in it, and tiny:qwen3 has \d+"),
    ([], {}, "--tokens .*: no kept tokens are there. Set mismatch.keep_tokens=4"),
])  # fmt: skip
def test_tokens_that_are_not_there_or_not_the_models_are_refused(explain_kept, responses, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        explain_kept(*responses, **changes)
