"""What `explain` finds with made-up engines; what every job does is in tests/tools/jobs/test_contract.py."""

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from made_up import bf16_rounds, two_tokens
from rich.console import Console

from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.page import FILES
from verl_precision.tools.gap.explain.settings import Explanation


@pytest.fixture
def explain(tmp_path, made_up):
    def run(**changes):
        job, shown = Explanation(max_prompts=3, output=tmp_path / "job", **changes), io.StringIO()
        return session.explain(job, Console(file=shown, width=160)), shown.getvalue()

    return run


def test_healthy_pair(explain, made_up, tmp_path):
    result, shown = explain()
    assert "Nothing is wrong" in shown and "FAULT" not in shown
    assert result.bf16_cost == pytest.approx(0.01, rel=1e-5)
    # One process for what the same engine can compute: vLLM in BF16 and FP32, the trainer in FP32 and BF16.
    assert Counter(name for name, _, _ in made_up.seen) == {
        "rollout": 10, "rollout_fp32": 4, "engine_fp32": 3, "trainer_alone": 6, "operations": 2
    }  # fmt: skip
    assert [left for name, left, _ in made_up.seen if name == "rollout"] == [2, 1, 0, 2, 1, 0, 0, 0, 0, 0], (
        "the last four alone"
    )
    sentence = "Operations at prefill_alone: the first that differs is rotary (model.layers.1.self_attn.rotary_emb). "
    assert sentence + "They add most: rotary 90%, head 10%." in shown
    files = {file.name for file in (tmp_path / "job").iterdir()}
    assert files == {*FILES, "journal.jsonl", "operations-prefill_alone.json", "operations-rollout_fp32.json"}
    content = json.loads((tmp_path / "job" / "explanation.json").read_text())
    assert content["verdict"].startswith("Mean |gap|") and len(content["steps"]) == len(content["path"]) - 1
    assert sum(step["k3"] for step in content["steps"]) == pytest.approx(content["k3"])
    page = (tmp_path / "job" / "explanation.html").read_text()
    assert content["verdict"] in page and "data:image/svg+xml;base64," in page and "http" not in page.split("base64")[0]


def test_fault_between_the_engines(explain, made_up):
    def wrong(name):
        return (-1.2, -2.0) if name.startswith("rollout") else bf16_rounds(name)

    made_up.answer = partial(two_tokens, log_probs=wrong)
    result, shown = explain()
    assert result.findings[0].variant.cause == "engine" and result.findings[0].fault
    assert "Something is wrong. engine: the two engines do not compute the same function" in shown


def test_tokens_that_a_second_drawing_changes_are_left_out(explain, made_up):
    def other_second_token(name, request):
        response = two_tokens(name, request)
        return replace(response, token_ids=(response.token_ids[0], 8)) if name == "untruncated" else response

    made_up.answer = other_second_token
    result, shown = explain(top_p=0.8)
    assert (result.attribution.tokens, result.attribution.left_out) == (3, 3)
    assert "3 tokens have no finite log-prob" in shown
