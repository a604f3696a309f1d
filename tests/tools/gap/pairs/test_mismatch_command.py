"""`verl-precision mismatch`: refuses before anything is written, continues, and is no second time at work."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.base.errors import ConfigurationError
from verl_precision.cli import app
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.gap.pairs import session
from verl_precision.tools.jobs.prompts import read_prompts

FIGURES = ["tokens.png", "token_gaps.png", "sequences.png", "grid.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train-dtype", "fp8"], "--train-dtype fp8: this cannot work"),
        (["--prompts", "setup.py"], "setup.py: unknown format '.py'. Allowed: .parquet, or .jsonl"),
        (["--max-response-tokens", "5000"], "the model's context 2048"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(arguments, words, monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["mismatch", *arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


class MadeUp:
    """Every engine: two tokens a response; the score is a little off. It dies after some responses."""

    engines = 1

    def __init__(self, seen, lives):
        self.asked, self.seen, self.lives = [], seen, lives

    def submit(self, requests):
        self.asked += requests

    def poll(self):
        if self.lives and len(self.seen) >= self.lives:
            raise KeyboardInterrupt
        request = self.asked.pop(0)
        self.seen.append(request)
        if not request.response_token_ids:
            ids = (request.seed % 500, 7)
            return [Response(request.problem, request.response, 2, token_ids=ids, log_probs=(-1.0, -2.0))]
        return [Response(request.problem, request.response, 2, log_probs=(-1.1, -2.0))]

    def close(self):
        """Nothing is held."""


@pytest.fixture
def measure(tmp_path, monkeypatch, job_of):
    """Measure two of the built-in prompts with made-up engines; return the pairs, the requests, and what is shown.

    The figures, which take seconds, are drawn in test_measure.py.
    """
    monkeypatch.setattr(session, "write_figures", lambda folder, pairs, title: FIGURES)
    seen = []

    def run(folder: str = "job", lives: int = 0, **changes):
        shown = io.StringIO()
        monkeypatch.setattr(session, "start_engine", lambda build, *arguments: MadeUp(seen, lives))
        console = Console(file=shown, width=120)
        prompts = read_prompts(None, "prompt", 2)
        return session.measure_mismatch(job_of(**changes), prompts, tmp_path / folder, console), shown.getvalue()

    return run, seen


def test_a_job_interrupted_twice_ends_as_if_it_were_not_and_is_then_only_written_up(measure, tmp_path):
    run, requests = measure
    whole, _ = run("whole")
    drawn = list(requests)
    assert len(drawn) == 12 + 24
    requests.clear()
    for lives in (4, 15):  # in the first samples; in the first scores
        with pytest.raises(KeyboardInterrupt):
            run(lives=lives)
    pairs, shown = run()
    assert requests == drawn, "nothing twice, nothing left out, and the same seeds"
    assert [pair.k3 for pair in pairs] == [pair.k3 for pair in whole] and len(pairs) == 4
    assert "resuming: 15 responses" in shown and "3/6 responses sampled in fp16, scored in fp16" in shown
    lines = [(tmp_path / folder / "journal.jsonl").read_text() for folder in ("whole", "job")]
    assert lines[0] == lines[1]

    _, shown = run()
    assert requests == drawn
    assert "resuming: 36 responses" in shown and "wrote table.md, summary.json, tokens.png" in shown
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"journal.jsonl", "table.md", "summary.json"}
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["prompt_count"] == 2


def test_other_settings_versions_and_prompts_are_refused(measure, tmp_path, monkeypatch):
    run, _ = measure
    run()
    before = (tmp_path / "job" / "journal.jsonl").read_bytes()
    for changes, words in (
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"responses": 4, "attention": "flash_attention_2"}, "responses: 3 there, 4 now"),
        ({"rollout_dtypes": ("bf16",)}, r"rollout_dtypes: \['fp16', 'bf16'\] there, \['bf16'\] now"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            run(**changes)
    with monkeypatch.context() as patch:
        patch.setattr(session, "installed_versions", lambda: {"verl": "0"})
        with pytest.raises(ConfigurationError, match="version of verl: '.*' there, '0' now"):
            run()
    monkeypatch.setattr(session, "tokenize", lambda prompts, model: [(1, 2)] * 2)
    with pytest.raises(ConfigurationError, match="prompt_token_ids: "):
        run()
    assert (tmp_path / "job" / "journal.jsonl").read_bytes() == before
