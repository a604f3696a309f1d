"""The findings of `explain` with made-up engines, other choices of experts among them; with jobs/test_contract.py."""

import io
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made_up import two_tokens
from rich.console import Console

from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.judge import judge
from verl_precision.tools.gap.explain.variants import REPLAYED, variants
from verl_precision.tools.jobs.settings import Explanation


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
    assert "At 32,768 tokens" in shown
    assert result.bf16_cost == pytest.approx(0.01, rel=1e-5)
    # One process for what the same engine can compute: vLLM in BF16 and FP32, the trainer in FP32 and BF16.
    counts = {"rollout": 9, "rollout_fp32": 3, "engine_fp32": 3, "trainer_alone": 6}
    assert Counter(name for name, _, _ in made_up.seen) == counts
    left = [left for name, left, _ in made_up.seen if name == "rollout"]
    assert left == [2, 1, 0, 2, 1, 0, 0, 0, 0], "the last three alone"
    assert {file.name for file in (tmp_path / "job").iterdir()} == {"explanation.json", "journal.jsonl"}
    assert content["verdict"].startswith("Mean |gap|") and len(content["steps"]) == len(content["path"]) - 1
    assert sum(step["k3"] for step in content["steps"]) == pytest.approx(content["k3"])


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

    found = judge(job, chain, along(rounding, routing), along(routing), 128)
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


@pytest.mark.parametrize(("other", "cost"), [(2, 0.3), (0, 0.0)])
def test_other_choices_are_a_cause(explain, made_up, other, cost):
    made_up.answer = choosing(other)
    result, shown, _ = explain(model="tiny:qwen3_moe", packed=True)
    assert not {"prefill_alone", "trainer_alone", "engine_fp32", "rollout_fp32"} & set(shown.split())
    routing = next(each for each in result.findings if each.variant.cause == "routing")
    assert routing.part.size == pytest.approx(cost / 2, abs=1e-6), "the first of two tokens"
    assert routing.fault == (cost > 0) and (not cost or result.findings[0] is routing)
    by_cause = {each.variant.cause: each.part.size for each in result.findings}
    assert by_cause["trainer_precision"] == pytest.approx(0.005, abs=1e-6), "rounding is what it is without them"
    assert result.bf16_cost == pytest.approx(0.005, abs=1e-6)
    replays = [request for name, request in made_up.requests if name == REPLAYED]
    assert len(replays) == (6 if cost else 0), "of two variants of the trainer; a set has no order"
