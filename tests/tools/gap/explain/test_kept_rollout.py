"""`explain --tokens` scores what a run kept, and draws nothing; what does not fit is refused by name."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from kept_responses import response
from made_up import two_tokens
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.kept_tokens.kept_file import append


def kept(step: int = 1, seed: int = 0, **changes):
    """A response of two tokens: a made-up engine gives -1.01 and -1.99 in BF16, and the run has said -1.02 and -2."""
    fields = {
        "token_ids": np.array([5, 7], "i4"), "prompt_ids": np.array([1, 2, 3], "i4"), "mask": np.ones(2, "u1"),
        "rollout_log_probs": np.array([-1.02, -2.0], "f4"),
    }  # fmt: skip
    return response(step, 2, seed=seed, **{**fields, **changes})


@pytest.fixture
def explain(tmp_path, made_up):
    def run(*responses, **changes):
        file = tmp_path / "kept_tokens"
        if responses:
            append(file, responses)
        job = Explanation(output=tmp_path / "job", tokens=str(file), **changes)
        shown = io.StringIO()
        return session.explain(job, Console(file=shown, width=160)), shown.getvalue()

    return run


def scored(made_up) -> list:
    """What was asked for log-probs; records of operations cut a sequence elsewhere."""
    return [(name, request) for name, request in made_up.requests if len(request.prompt_token_ids) == 3]


def test_the_runs_tokens_are_scored_and_none_is_drawn(explain, made_up, tmp_path):
    result, _ = explain(kept(), kept(seed=1), kept(2))
    asked = [request for _, request in scored(made_up)]
    assert asked and all(request.response_token_ids == (5, 7) for request in asked)
    assert {(request.problem, request.prompt_token_ids) for request in asked} == {("0", (1, 2, 3)), ("1", (1, 2, 3))}
    lines = [json.loads(line) for line in (tmp_path / "job" / "journal.jsonl").read_text().splitlines()[1:]]
    drawn = [line for line in lines if line.get("rollout") == "rollout" and line.get("token_ids")]
    assert [line["log_probs"] for line in drawn] == [[float(f"{np.float32(-1.02):.9g}"), -2.0]] * 2, "as the run said"
    assert result.attribution.tokens == 4
    by_cause = {finding.variant.cause: finding.part.size for finding in result.findings}
    assert by_cause["decode"] == pytest.approx(0.01, rel=1e-4), "0.01 at each of both tokens"
    before = len(made_up.requests)
    explain()
    assert len(made_up.requests) == before, "the same command goes on, and everything is there"


def test_a_step_is_chosen_and_long_responses_are_cut(explain, made_up):
    made_up.answer = one_token
    explain(kept(1), kept(2, token_ids=np.array([8, 9], "i4")), step=2, max_response_tokens=1, max_prompts=1)
    assert {request.response_token_ids for _, request in scored(made_up)} == {(8,)}


def one_token(name, request):
    return replace(two_tokens(name, request), length=1, log_probs=(-1.0,))


def test_tool_output_has_nothing_to_compare_with(explain):
    result, _ = explain(kept(mask=np.array([1, 0], "u1"), rollout_log_probs=np.array([-1.02, math.nan], "f4")))
    assert (result.attribution.tokens, result.attribution.left_out) == (1, 1)


@pytest.mark.parametrize(("settings", "cause"), [
    ({}, "decode"),
    ({"prefix_caching": True}, "decode"),
    ({"top_p": 0.8}, "sampling"),
    ({"raw_log_probs": True, "temperature": 0.7, "prefix_caching": True}, "temperature"),
])  # fmt: skip
def test_one_step_holds_all_that_was_special_about_the_drawing(settings, cause):
    chain = variants(Explanation(tokens="kept_tokens", **settings))
    assert [one.draws for one in chain] == [True] + [False] * (len(chain) - 1)
    assert chain[1].cause == cause and chain[1].name == "prefill"
    scored = [one for one in variants(Explanation(**settings)) if not one.draws]
    assert chain[2:] == scored[1:], "from there on it is the path of fresh tokens"


@pytest.mark.parametrize(("changes", "message"), [
    ({"step": 7}, "--step 7: no response of it was kept. Allowed: 1"),
    ({"model": "tiny:qwen3_moe"}, "a mixture of experts"),
])  # fmt: skip
def test_what_is_not_there_is_refused(explain, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        explain(kept(), **changes)


def test_tokens_of_another_vocabulary_are_refused(explain):
    with pytest.raises(ConfigurationError, match=r"token 999999 is in it, and tiny:qwen3 has \d+: another model"):
        explain(kept(token_ids=np.array([5, 999_999], "i4")))


def test_a_file_that_is_not_there_is_refused(explain):
    with pytest.raises(ConfigurationError, match="--tokens .*there is no such folder. Set mismatch.keep_tokens=4"):
        explain()


@pytest.mark.parametrize("changes", [{"step": 1}, {"tokens": "t", "prompts": "p"}, {"tokens": "t", "responses": 2}])
def test_settings_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ConfigurationError, match="--tokens"):
        Explanation(**changes)
