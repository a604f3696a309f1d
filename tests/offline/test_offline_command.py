"""`verl-precision mismatch`: refuses before anything is written; goes on where everything is done."""

import io
import json

import pytest
from made import settings_of, written
from rich.console import Console
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.offline import session
from verl_precision.offline.prompts import read_prompts, tokenised
from verl_precision.offline.settings import load_tokenizer
from verl_precision.offline.store import create_or_resume

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere/qwen"], "--model /nowhere/qwen: no model could be read there"),
        (["--train-dtype", "fp8"], "--train-dtype fp8: there is no such dtype. Allowed: bf16, fp16, fp32"),
        (["--prompts", "setup.py"], "--prompts setup.py: allowed is .parquet, or .jsonl"),
        (["--max-response-tokens", "5000"], "the model's context 2048"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(arguments, words, monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    result = runner.invoke(app, ["mismatch", *arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_finished_analysis_is_only_written_up(tmp_path, fill, terminal):
    """Everything but the engines: two prompts of the built-in ones, their samples and scores made up."""
    settings, prompts, folder = settings_of(), read_prompts(None, "prompt", 2), tmp_path / "analysis"
    ids = tokenised(prompts, load_tokenizer(settings.model))
    store = create_or_resume(folder, settings, ids, session.versions())
    fill(store)
    before = written(folder)
    seen = io.StringIO()
    pairs = session.analyse(settings, prompts, folder, Console(file=seen, width=120, force_terminal=terminal))
    assert written(folder) == before
    assert not (folder / "logs").exists(), "no process was started"
    assert len(pairs) == 4
    assert "12/12" in seen.getvalue() and "table.md" in seen.getvalue()
    names = {path.name for path in folder.iterdir()}
    assert {"table.md", "summary.json", "tokens.png", "token_gaps.png", "sequences.png", "grid.png"} <= names
    assert json.loads((folder / "summary.json").read_text())["prompt_count"] == 2
