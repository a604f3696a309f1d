"""The command line: what a user types, sees, and finds on disk; what is refused, by name, before anything starts."""

import errno
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from verl_precision import __version__
from verl_precision.cli import app
from verl_precision.cli.verb import SECTIONS, console, silence_third_party
from verl_precision.tools.runs.page import MARK

REFUSALS = Path(__file__).with_name("refusals.txt")


@pytest.fixture
def type_in(at_root, tmp_path, typed):
    """Type a command in the repository's root; OUT stands for a folder that is not there, RUN for a run's metrics."""
    (tmp_path / "run.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    meant = {"OUT": str(tmp_path / "out"), "RUN": str(tmp_path / "run.jsonl")}
    return lambda *words: typed(*(re.sub("OUT|RUN", lambda match: meant[match.group()], word) for word in words))


@pytest.mark.parametrize("row", [row for row in REFUSALS.read_text().splitlines() if row[0] != "#"])
def test_refused_by_name_before_anything_starts(type_in, tmp_path, row):
    command, code, words = row.split(" | ")
    found, output = type_in(*command.split())
    assert found == int(code) and words in " ".join(output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("page", ["--version", "--help", "check --help", "compare --help"])
def test_nothing_heavy_is_imported_for_help_and_version(root, page):
    command = [sys.executable, "-X", "importtime", "-m", "verl_precision.cli", *page.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.strip() == __version__) if page == "--version" else "Options:" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert page == "--version" or not {"pydantic", "packaging"} & imported, "half of a page's time"
    assert "typer" in imported and not {"verl", "vllm", "torch", "ray", "numpy", "pyarrow", "matplotlib"} & imported
    base = (root / "setup.py").read_text().partition("\n]")[0]
    assert imported >= {"typer", "rich"} and all(f'"{name}>=' in base for name in ("typer", "rich", "pyyaml"))


def test_check_passes_here_and_speaks_json(run_python):
    done = run_python("from verl_precision.cli import app; app(['check', '--json'])")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "only what is its own: no notes and warnings of verl, vLLM or transformers"
    content = json.loads(done.stdout)
    assert content["versions"]["verl-precision"] == __version__ and content["ok"] is True
    assert all(finding["ok"] for finding in content["findings"])
    assert any("platform cpu" in finding["detail"] for finding in content["findings"])


def test_errors_of_others_are_shown_and_nothing_stays_hidden(caplog):
    importlib.import_module("model_hosting_container_standards.logging_config")  # as vLLM's server does: conftest.py
    other = logging.getLogger("other")
    with silence_third_party():
        other.warning("hidden")
        other.error("shown")
        warnings.warn("hidden", stacklevel=1)
    other.warning("after")
    assert [record.message for record in caplog.records] == ["shown", "after"]
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    with pytest.warns(UserWarning, match="heard again"):
        warnings.warn("heard again", stacklevel=1)


def test_a_report_is_written_again_and_nothing_else_is_written_over(type_in, tmp_path):
    page = tmp_path / "report[red].html"  # rich would take the end of its name for a style
    command = ("report", "RUN", "--output", str(page))
    for _ in range(2):
        assert type_in(*command) == (0, f"wrote {page}: open it in a browser") and MARK in page.read_text()
    page.write_text("my thesis")
    code, output = type_in(*command)
    assert code == 1 and "not an earlier report" in output and "--force" in output
    assert page.read_text() == "my thesis"
    assert type_in(*command, "--force")[0] == 0 and MARK in page.read_text()


def test_no_part_of_a_folder_is_taken_for_a_style():
    with console.capture() as said:
        console.print("written in /a[/b]/c[red]/12[3]", soft_wrap=True)
    assert said.get() == "written in /a[/b]/c[red]/12[3]\n"


@pytest.mark.parametrize("command", [
    "watch RUN", "report RUN --output OUT", "compare recipes/quickstart/quickstart.yaml --output OUT",
    "mismatch --model m --output OUT",
])  # fmt: skip
def test_what_a_verb_needs_is_named_before_it_does_anything(type_in, monkeypatch, tmp_path, command):
    found = importlib.util.find_spec
    absent = ("jinja2", "matplotlib", "starlette")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name in absent else found(name, *of))
    code, output = type_in(*command.split())
    needs = {"watch": "jinja2 and starlette", "report": "jinja2"}.get(command.split()[0], "jinja2 and matplotlib")
    assert code == 1 and f"needs {needs}" in output and "pip install" in output
    assert not (tmp_path / "out").exists()


def test_help_has_each_verb_once_under_its_section():
    pages = [CliRunner().invoke(app, [option], env={"COLUMNS": "80"}).output for option in ("-h", "--help")]
    found = re.findall(r"^(?:(\w.*):|  ([a-z][a-z-]+)  .*)$", pages[0], re.M)
    assert pages[0] == pages[1] and [section for section, _ in found if section in SECTIONS] == [*SECTIONS]
    assert sorted(name for _, name in found if name) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("verb", typer.main.get_command(app).commands)
def test_at_80_columns_help_has_every_option_whole(verb):
    parameters = typer.main.get_command(app).get_command(None, verb).params
    done = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0 and max(map(len, done.output.splitlines())) <= 80
    options = {name for each in parameters for name in each.opts if name.startswith("-")}
    assert options <= set(re.findall(r"(?<![\w-])-[\w-]+", done.output))


def test_a_tiny_model_is_written_once_and_ctrl_c_says_what_the_verb_says_of_it(type_in, tmp_path, monkeypatch):
    assert type_in("tiny-model", "qwen3", "OUT")[0] == 0 and (tmp_path / "out" / "config.json").is_file()
    code, output = type_in("tiny-model", "qwen3", "OUT")
    assert code == 1 and "nothing was written" in output
    interrupted = Mock(side_effect=KeyboardInterrupt("all is in out"))
    monkeypatch.setattr("verl_precision.tools.tiny_model.build_tiny_model", interrupted)
    assert type_in("tiny-model", "qwen3", "OUT") == (130, "interrupted; all is in out")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("command", "work"), [
    ("compare recipes/quickstart/quickstart.yaml", "verl_precision.tools.runs.compare.run.compare_runs"),
    ("mismatch --model m", "verl_precision.tools.gap.gate.measure_and_judge"),
])  # fmt: skip
def test_a_signal_ends_a_verb_as_ctrl_c_does_and_another_does_not_break_its_cleaning(
    type_in, monkeypatch, request, number, command, work
):
    cleaned = []

    def ended(*arguments):
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 60)  # at its end at the latest it is raised
        finally:
            for each in (signal.SIGTERM, number):
                os.kill(os.getpid(), each)
            cleaned.append("all")  # a signal that is heard has been raised by now

    monkeypatch.setattr(work, ended)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for each in numbers:  # which a shell's background job, and this process is one's, may not hear
        handler = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        request.addfinalizer(partial(signal.signal, each, signal.signal(each, handler)))
    code, output = type_in(*command.split(), "--output", "OUT")
    assert code == 128 + number and output.startswith("interrupted; every process") and cleaned
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "nor when the process ends"


def test_a_signal_that_is_ignored_stays_so(type_in, monkeypatch, request):
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)))  # nohup
    hang_up = Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    monkeypatch.setattr("verl_precision.tools.tiny_model.build_tiny_model", hang_up)
    assert type_in("tiny-model", "qwen3", "OUT")[0] == 0


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device. Free some space"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied. Name a place where you have"),
    (OSError(errno.ENOSPC, "No space left on device"), "the output: No space left on device. Free"),
    (OSError("the hub says nothing"), "the hub says nothing"),
])  # fmt: skip
def test_what_the_system_refuses_is_said_in_words_once(type_in, monkeypatch, error, words):
    monkeypatch.setattr("verl_precision.tools.tiny_model.build_tiny_model", Mock(side_effect=error))
    code, output = type_in("tiny-model", "qwen3", "OUT")
    assert code == 1 and output.startswith(f"error: {words}") and output.count("error") == 1


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("command", ["--help", "watch RUN --once", "report RUN --output OUT"])
def test_a_full_disk_behind_the_output_is_said_and_of_a_closed_pipe_nothing(
    type_in, tmp_path, monkeypatch, capsys, closed, command
):
    reading, writing = os.pipe()
    os.close(reading)
    meant = {"RUN": str(tmp_path / "run.jsonl"), "OUT": str(tmp_path / "out")}
    monkeypatch.setattr(console, "quiet", False)  # rich makes it so where a pipe is closed
    with suppress(BrokenPipeError), open(writing, "w") as pipe, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", pipe if closed else full)
        with pytest.raises(SystemExit) as ended:
            app([meant.get(word, word) for word in command.split()])
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 1 and (said == "" if closed else said.startswith("error: the output: No space left"))
