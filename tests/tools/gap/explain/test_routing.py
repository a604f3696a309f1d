"""What other choices of experts do is taken out of every step, and is one step of its own."""

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from verl_precision.tools.engines.engine import Response
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.judge import judge
from verl_precision.tools.gap.explain.routing import Routing, with_routing
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import REPLAYED, variants

JOB = Explanation(model="tiny:qwen3_moe", max_prompts=3, packed=True)


def test_parts_are_rounding_and_routing():
    chain = variants(JOB, routed=True)[:3]
    rounding, routing = [0.0, 0.01, 0.03], [0.0, 0.2, 0.5]  # of each variant, from the rollout on
    log_probs = {one.name: np.array([-1 + a + b]) for one, a, b in zip(chain, rounding, routing, strict=True)}
    choices = {one.name: np.array([-7 + b]) for one, b in zip(chain, routing, strict=True)}
    longer, found = with_routing(chain, log_probs, Routing(choices, 0.1), kept=())
    assert [one.cause for one in longer] == [*(one.cause for one in chain), "routing"]
    assert np.diff(np.concatenate(found)) == pytest.approx([0.01, 0.02, 0.5])
    assert found[-1] == log_probs[chain[-1].name], "the whole is what it was"
    _, found = with_routing(chain, log_probs, Routing(choices, 0.1), kept={chain[1].cause})
    assert np.diff(np.concatenate(found)) == pytest.approx([0.21, 0.02, 0.3]), "its choices are its own"


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

    found = judge(job, chain, along(rounding, routing), Routing(along(routing), 0.1), {}, {})
    assert {each.variant.cause: round(each.part.size, 6) for each in found.findings if each.part.size} == {
        "weights": 0.6, "decode": 0.4, "rollout_precision": 0.01, "trainer_precision": 0.01, "routing": 0.002,
    }  # fmt: skip
    assert {each.variant.cause for each in found.findings if each.fault} == {"weights", "decode"}


def choosing(other):
    """Return answers: vLLM chooses experts 0 and 1, in BF16 it and the trainer 1 and `other`; 2 takes 0.3 nats."""

    def answer(name, request):
        drawn = None if request.response_token_ids else (5, 7)
        length = len(request.prompt_token_ids) + 1  # without the last of two tokens
        experts = np.zeros((length, 1, 2), np.int16)
        experts[:] = (1, 0) if name in ("rollout", "rollout_fp32", "engine_fp32") else (other, 1)
        if request.routed_experts is not None:
            assert request.routed_experts.shape == experts.shape
            experts = request.routed_experts
        rounding = 0.01 if name in ("rollout", "trainer_alone", "trainer") else 0.0
        value = -1.0 + rounding - 0.3 * (experts[-1] == 2).any()
        said = None if name == REPLAYED else experts
        return Response(request.problem, request.response, 2, None, None, drawn, (value, -2.0), None, said)

    return answer


@pytest.mark.parametrize(("other", "cost", "changed"), [(2, 0.3, 0.5), (0, 0.0, 0.0)])
def test_other_choices_are_a_cause(tmp_path, monkeypatch, made_up, other, cost, changed):
    made_up.answer = choosing(other)
    monkeypatch.setattr(session, "read_operations", lambda path: None)
    monkeypatch.setattr(session, "write", lambda *_: None)
    monkeypatch.setattr(session, "show", lambda *_: None)
    monkeypatch.setattr("verl_precision.tools.gap.explain.operations.FileWork.done", 1)
    result = session.explain(replace(JOB, output=tmp_path), Console(quiet=True))
    routing = next(each for each in result.findings if each.variant.cause == "routing")
    assert routing.part.size == pytest.approx(cost / 2, abs=1e-6), "the first of two tokens"
    assert routing.evidence == f"{changed:.2%} of the choices differ between rollout and trainer"
    assert routing.fault == (cost > 0) and result.findings[0].variant.cause == (
        "routing" if cost else result.findings[0].variant.cause
    )
    by_cause = {each.variant.cause: each.part.size for each in result.findings}
    assert by_cause["trainer_precision"] == pytest.approx(0.005, abs=1e-6), "rounding is what it is without them"
    assert result.bf16_cost == pytest.approx(0.005, abs=1e-6)
    replays = [request for name, request in made_up.requests if name == REPLAYED]
    assert len(replays) == (6 if cost else 0), "of two variants of the trainer; a set has no order"
