"""`verl-precision mismatch`: refuses before anything is written, continues, and is no second time at work."""

import io
import json

import pytest
from made import job_of
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.errors import ConfigurationError
from verl_precision.offline_mismatch import session
from verl_precision.offline_mismatch.prompts import read_prompts
from verl_precision.offline_mismatch.settings import MismatchJob
from verl_precision.sampling.engine import Response

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere/qwen"], "--model /nowhere/qwen: no such folder, and not a hub name"),
        (["--train-dtype", "fp8"], "--train-dtype fp8: this cannot work. Allowed: 'bf16', 'fp16' or 'fp32'"),
        (["--prompts", "setup.py"], "setup.py: unknown format '.py'. Allowed: .parquet, or .jsonl"),
        (["--max-response-tokens", "5000"], "the model's context 2048"),
        (["--shard-responses", "8", "--responses", "0"], "warning: --shard-responses is now called --in-flight"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(arguments, words, monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    result = runner.invoke(app, ["mismatch", *arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


class MadeUp:
    """Every engine: two tokens a response; the score is a little off. It dies after some responses."""

    engines = 1
    lives = 10**9
    seen: list[tuple] = []

    def __init__(self):
        self.asked = []

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        if MadeUp.lives < 1:
            raise KeyboardInterrupt
        MadeUp.lives -= 1
        request = self.asked.pop(0)
        MadeUp.seen.append(request)
        if not request.response_token_ids:
            ids = (request.seed % 500, 7)
            return [Response(request.problem, request.response, 2, token_ids=ids, log_probs=(-1.0, -2.0))]
        return [Response(request.problem, request.response, 2, log_probs=(-1.1, -2.0))]

    def close(self):
        """Nothing is held."""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Two of the built-in prompts, with engines that are made up; returns the pairs and what a user saw."""
    monkeypatch.setattr(MadeUp, "lives", 10**9)
    monkeypatch.setattr(MadeUp, "seen", [])
    monkeypatch.setattr(session, "start_engine", lambda build, name, folder, ray_address: MadeUp())

    def run(job: MismatchJob | None = None, folder: str = "job", terminal: bool = False):
        seen = io.StringIO()
        console = Console(file=seen, width=120, force_terminal=terminal)
        prompts = read_prompts(None, "prompt", 2)
        return session.measure_mismatch(job or job_of(), prompts, tmp_path / folder, console), seen.getvalue()

    return run


@pytest.mark.parametrize("terminal", [True, False])
def test_a_finished_job_is_only_written_up(measure, tmp_path, terminal, monkeypatch):
    pairs, _ = measure()
    assert len(MadeUp.seen) == 12 + 24
    journal = (tmp_path / "job" / "journal.jsonl").read_bytes()
    monkeypatch.setattr(session, "start_engine", lambda *arguments: pytest.fail("engine started"))
    again, seen = measure(terminal=terminal)
    assert (tmp_path / "job" / "journal.jsonl").read_bytes() == journal
    assert [pair.k3 for pair in again] == [pair.k3 for pair in pairs] and len(pairs) == 4
    assert "6/6" in seen and "responses sampled in bf16" in seen and "12/12" in seen and "table.md" in seen
    names = {path.name for path in (tmp_path / "job").iterdir()}
    figures = {"tokens.png", "token_gaps.png", "sequences.png", "grid.png"}
    assert names == {"journal.jsonl", "table.md", "summary.json", *figures}
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["prompt_count"] == 2


def test_an_interrupted_job_continues_with_the_same_draws(measure, tmp_path):
    whole, _ = measure(folder="whole")
    requests = list(MadeUp.seen)
    MadeUp.seen.clear()
    for lives in (4, 11):  # in the first samples; in the first scores
        MadeUp.lives = lives
        with pytest.raises(KeyboardInterrupt):
            measure()
    MadeUp.lives = 10**9
    pairs, seen = measure()
    assert MadeUp.seen == requests, "nothing twice, nothing left out, and the same seeds"
    assert [pair.k3 for pair in pairs] == [pair.k3 for pair in whole]
    assert "3/12 responses scored in fp16" in seen
    lines = [(tmp_path / folder / "journal.jsonl").read_text() for folder in ("whole", "job")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"responses": 4, "attention": "flash_attention_2"}, "responses: 3 there, 4 now"),
        ({"rollout_dtypes": ("bf16",)}, r"rollout_dtypes: \['fp16', 'bf16'\] there, \['bf16'\] now"),
    ],
)
def test_other_settings_are_refused(measure, tmp_path, changes, words):
    measure()
    before = (tmp_path / "job" / "journal.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match=words):
        measure(job_of(**changes))
    assert (tmp_path / "job" / "journal.jsonl").read_bytes() == before


def test_other_versions_and_prompts_are_refused(measure, monkeypatch):
    measure()
    monkeypatch.setattr(session, "versions", lambda: {"verl": "0"})
    with pytest.raises(ConfigurationError, match="version of verl: '.*' there, '0' now"):
        measure()
    monkeypatch.undo()
    monkeypatch.setattr(session, "tokenize", lambda prompts, model: [(1, 2)] * 2)
    with pytest.raises(ConfigurationError, match="prompt_token_ids: "):
        measure()


def test_a_job_of_the_former_version_is_refused(measure, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "settings.json").write_text('{"format": "verl_precision offline analysis 1"}')
    with pytest.raises(ConfigurationError, match=r"it has settings.json and no journal.*finished by that version"):
        measure()
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["settings.json"]
