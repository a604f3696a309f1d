"""Shared fixtures."""

import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import forked
import hypothesis
import pytest
from typer.testing import CliRunner

from verl_precision.cli import app

# A test process talks to nobody: no hub, no cluster of somebody else's.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("VERL_PLATFORM", None)

# vLLM's server imports this module, which raises the root logger and every handler that it has by then to ERROR. In a
# test these would be pytest's own, until the process ends. Imported here it finds none of those, and what it did to
# the others is undone.
before = {log: log.level for log in (logging.root, *logging.root.handlers)}
importlib.import_module("model_hosting_container_standards.logging_config")
for log, level in before.items():
    log.setLevel(level)

# The files that take longest, longest first; `make test` hands out whole files in this order.
LONG = (
    *("test_ranks.py", "test_vllm_arithmetic.py", "test_accelerator.py", "test_recipes.py", "test_rules.py"),
    *("test_recipe_config.py", "test_winning_words.py", "test_planted_edits.py", "test_plugin.py", "test_launch.py"),
    *("test_situations.py", "test_canary_requests.py", "test_presets.py", "test_install.py", "test_launch_run.py"),
    *("test_known_faults.py", "test_live_page.py", "test_math_answers.py", "test_worker.py", "test_fork_server.py"),
    *("test_features.py", "test_weights_out.py", "test_preflight.py", "test_cli.py", "test_fused.py"),
    *("test_unknowns.py", "test_words.py", "test_command.py", "test_estimators_train.py", "test_compare_runs.py"),
    *("test_contract.py", "test_loss_trial.py", "test_witnesses.py", "test_run_identity.py", "test_scales.py"),
)

# Two test processes share two cores: how long an example takes says nothing. The same examples at every run, so that a
# change is judged by what it changed; `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process of all: its test processes find the server it offers
        config.add_cleanup(forked.offer())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, so that no test process is left alone with one at the end."""
    items.sort(key=lambda item: LONG.index(file) if (file := item.path.name) in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Spare the collector of garbage the millions of objects that imports have made; a tenth of some tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def at_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes, and what they name, are named from the repository's root."""
    monkeypatch.chdir(root)


@pytest.fixture
def hear_signals() -> Callable[[], object]:
    """A `preexec_fn` for a process that a test interrupts.

    A shell without job control starts background jobs with SIGINT ignored, nohup with SIGHUP, and pytest's own
    processes inherit that.
    """
    return lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)]


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script in a clean interpreter, outside the repository, and return the completed process."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess:
        command, variables = [sys.executable, "-c", script], {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=180)

    return run


@pytest.fixture
def start_owner(root) -> Iterator[Callable[[Path, str], tuple[subprocess.Popen, str]]]:
    """Start a process of a job that takes a folder; return it, and whom it was told to own the folder, or "None"."""
    started = []

    def start(folder: Path, job: str) -> tuple[subprocess.Popen, str]:
        program = "import pathlib, sys\nfrom verl_precision.base.owner import take\n"
        program += "print(take(pathlib.Path(sys.argv[1])), flush=True)\nsys.stdin.read()"
        command = ["env", f"SLURM_JOB_ID={job}", sys.executable, "-c", program, str(folder)]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        started.append(subprocess.Popen(command, cwd=root, text=True, **pipes))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def typed() -> Callable[..., tuple[int, str]]:
    """Type a command in this process; return its exit code, and its output with each run of spaces as one."""

    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*map(str, words)])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, " ".join(done.output.split())

    return run


@pytest.fixture
def findings(typed) -> Callable[..., tuple[int, list[dict]]]:
    """Type `check` with some words; return its exit code, and what it found."""

    def run(*words: str) -> tuple[int, list[dict]]:
        code, said = typed("check", "--json", *words)
        return code, json.loads(said)["findings"]

    return run


@pytest.fixture
def row() -> Callable[..., dict]:
    """Make the row of a number, in a data set of verl's format."""
    return lambda number, **changes: {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
        **changes,
    }


@pytest.fixture
def write_rows() -> Callable[[Path, Sequence[dict]], Path]:
    def write(path: Path, rows: Sequence[dict]) -> Path:
        path.write_text("".join(json.dumps(values) + "\n" for values in rows))
        return path

    return write
