"""The command line teaches, and refuses by name."""

import importlib
import json
import logging
import os
import warnings

import pytest
from typer.testing import CliRunner

from verl_precision import __version__
from verl_precision.cli import app
from verl_precision.quiet import only_errors_of_others

runner = CliRunner()


def test_help_names_every_verb_and_version_prints():
    text = runner.invoke(app, ["--help"]).output
    for verb in ("check", "compare", "data", "patch", "report", "sanity-set", "tiny-model"):
        assert verb in text
    assert runner.invoke(app, ["--version"]).output.strip() == __version__


def test_check_passes_here_and_speaks_json(run_python):
    done = run_python("from verl_precision.cli import app; app(['check', '--json'])")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "only what is its own: no notes and warnings of verl, vLLM or transformers"
    content = json.loads(done.stdout)
    assert content["versions"]["verl-precision"] == __version__
    assert all(finding["ok"] for finding in content["findings"])
    assert any("platform cpu" in finding["detail"] for finding in content["findings"])


def test_check_says_what_is_wrong_and_exits_1(run_python):
    done = run_python("from verl_precision.cli import app; app(['check'])", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "FAIL" in done.stdout and "VERL_USE_EXTERNAL_PLUGINS='none' excludes it" in done.stdout


def test_errors_of_others_are_shown_and_nothing_stays_hidden(caplog):
    importlib.import_module("model_hosting_container_standards.logging_config")  # as vLLM's server does: conftest.py
    other = logging.getLogger("other")
    with only_errors_of_others():
        other.warning("hidden")
        other.error("shown")
        warnings.warn("hidden", stacklevel=1)
    other.warning("after")
    assert [record.message for record in caplog.records] == ["shown", "after"]
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    with pytest.warns(UserWarning, match="heard again"):
        warnings.warn("heard again", stacklevel=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such recipe"),
        (["setup.py", "-p", "fp61"], "--precision fp61: no such preset. Allowed: bf16, bf16_train_fp16_rollout"),
        (["setup.py", "-p", "fp16", "-p", "fp16"], "Allowed: each preset once"),
    ],
)
def test_compare_refuses_before_anything_starts(arguments, words, monkeypatch, root, tmp_path):
    monkeypatch.chdir(root)
    result = runner.invoke(app, ["compare", *arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_tiny_model_writes_once_and_never_over(tmp_path):
    folder = tmp_path / "model"
    assert runner.invoke(app, ["tiny-model", "qwen3", str(folder)]).exit_code == 0
    assert (folder / "config.json").is_file()
    again = runner.invoke(app, ["tiny-model", "qwen3", str(folder)])
    assert again.exit_code == 1 and "nothing was written" in again.output
    assert "Allowed: qwen3" in runner.invoke(app, ["tiny-model", "gpt9", str(tmp_path / "x")]).output


def test_errors_and_ctrl_c_are_shown_in_one_place(root):
    elsewhere = [
        str(path)
        for path in (root / "verl_precision").rglob("*.py")
        if path.name != "cli.py" and "typer.Exit(1" in path.read_text()
    ]
    assert elsewhere == []


@pytest.mark.parametrize(("said", "shown"), [("", "interrupted\n"), ("all is in out", "interrupted; all is in out\n")])
def test_ctrl_c_says_what_the_verb_says_of_it(monkeypatch, said, shown):
    def interrupted(*args):
        raise KeyboardInterrupt(said)

    monkeypatch.setattr("verl_precision.tiny_model.build_tiny_model", interrupted)
    done = CliRunner().invoke(app, ["tiny-model", "qwen3", "folder"])
    assert (done.exit_code, done.stderr) == (130, shown)
