"""`verl-precision explain` with made-up engines: what it asks of them, what it writes, and that it continues."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.gap.explain import session
from verl_precision.tools.gap.explain.page import FILES, show, write
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.jobs.prompts import read_prompts

OPERATIONS = json.dumps(
    {
        "operations": [
            {"kind": "rotary", "layer": 1, "error": 1e-2, "share": 0.9, "errors": [1e-3, 1e-2]},
            {"kind": "head", "layer": None, "error": 1e-3, "share": 0.1, "errors": [1e-3]},
        ],
        "first": "rotary (model.layers.1.self_attn.rotary_emb)",
        "bound": 2e-3,
        "nats": 1e-2,
        "remainder": 1e-9,
    }
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train-dtype", "fp8"], "--train-dtype fp8: this cannot work. Allowed: 'fp16', 'bf16' or 'fp32'"),
        (["--top-p", "0"], "--top-p 0"),
        (["--max-response-tokens", "5000"], "the model's context 2048"),
        (["--model", "nowhere/at-all", "--rollout-model", "tiny:none"], "nowhere/at-all"),
        (["--attention", "flash_attention_2", "--train-dtype", "fp32"], "flash-attn computes in 16 bits only"),
        (["--16-bit-log-probs", "--train-dtype", "fp32"], "a trainer in fp32 has no 16-bit logits"),
        (["--adapter", "recipes"], "--adapter recipes: there is no adapter in it"),
        (["--adapter", "a", "--rollout-model", "b"], "the rollout has the trainer's weights, merged"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(arguments, words, monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["explain", *arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


class MadeUp:
    """Every engine: two tokens a response, whose log-probs `given` tells. It dies after some responses."""

    engines = 1

    def __init__(self, name, given, seen, lives):
        self.name, self.given, self.seen, self.lives, self.asked = name, given, seen, lives, []

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        if self.lives and len(self.seen) >= self.lives:
            raise KeyboardInterrupt
        request = self.asked.pop(0)
        self.seen.append((self.name, len(self.asked), request))
        if request.record_to:
            Path(request.record_to).write_text(OPERATIONS)
        drawn = None if request.response_token_ids else (request.seed % 500, 7)
        return [Response(request.problem, request.response, 2, token_ids=drawn, log_probs=self.given(self.name))]

    def close(self):
        """Nothing is held."""


@pytest.fixture
def explain(tmp_path, monkeypatch):
    seen = []

    def run(given, lives=0, folder="job", **changes):
        def start(build, name, *_):
            return MadeUp(name, given, seen, lives)

        monkeypatch.setattr(session, "start_engine", start)
        monkeypatch.setattr(session, "rounded_copy", lambda model, dtype, target: model)
        job, shown = Explanation(**{"model": "tiny:qwen3", "prompts": "built-in", **changes}), io.StringIO()
        console = Console(file=shown, width=160)
        result = session.explain(job, read_prompts(None, "prompt", 3), tmp_path / folder, console)
        write(tmp_path / folder, job, result, ["verl-precision", "explain"])
        show(job, result, console)
        return result, shown.getvalue()

    return run, seen


def rounding(name):
    """BF16 alone moves a log-prob; vLLM and the trainer do it in the same way."""
    return (-1.0, -2.0) if name.endswith("fp32") else (-1.01, -1.99)


def test_healthy_pair(explain, tmp_path):
    run, seen = explain
    result, shown = run(rounding)
    assert "Nothing is wrong" in shown and "FAULT" not in shown
    assert result.bf16_cost == pytest.approx(0.01, rel=1e-5)
    # One process for what the same engine can compute: vLLM in BF16 and FP32, the trainer in FP32 and BF16.
    assert Counter(name for name, _, _ in seen) == {
        "rollout": 10, "rollout_fp32": 4, "engine_fp32": 3, "trainer_alone": 6, "operations": 2
    }  # fmt: skip
    assert [left for name, left, _ in seen if name == "rollout"] == [2, 1, 0, 2, 1, 0, 0, 0, 0, 0], (
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


def test_fault_between_the_engines(explain):
    run, _ = explain
    result, shown = run(lambda name: (-1.2, -2.0) if name.startswith("rollout") else rounding(name))
    assert result.findings[0].variant.cause == "engine" and result.findings[0].fault
    assert "Something is wrong. engine: the two engines do not compute the same function" in shown


def test_tokens_that_a_second_drawing_changes_are_left_out(explain, monkeypatch):
    run, _ = explain
    poll = MadeUp.poll

    def other_second_token(self):
        (response,) = poll(self)
        if self.name == "untruncated":
            ids = (response.token_ids[0], 8)
            return [Response(response.problem, response.response, 2, token_ids=ids, log_probs=response.log_probs)]
        return [response]

    monkeypatch.setattr(MadeUp, "poll", other_second_token)
    result, shown = run(rounding, top_p=0.8)
    assert (result.attribution.tokens, result.attribution.left_out) == (3, 3)
    assert "3 tokens have no finite log-prob" in shown


def test_a_job_interrupted_twice_ends_as_if_it_were_not(explain, tmp_path):
    run, seen = explain
    whole, _ = run(rounding, folder="whole")
    asked = [(name, request) for name, _, request in seen]
    seen.clear()
    for lives in (2, 11):
        with pytest.raises(KeyboardInterrupt):
            run(rounding, lives=lives)
    result, shown = run(rounding)
    again = [(name, request) for name, _, request in seen]
    assert sorted(str(one).replace("/whole/", "/job/") for one in asked) == sorted(map(str, again))
    assert result == whole and "resuming: 10 responses" in shown
    run(rounding)
    assert len(seen) == len(asked), "a finished job computes nothing"
