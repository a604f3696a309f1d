"""Recipes name their files from the repository's root; their scripts are no modules of the package."""

import importlib.util
import os
import shutil
import subprocess

import pytest
from composer import ROOT


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def load_script():
    """Load a script under recipes/ as a module."""

    def load(path):
        specification = importlib.util.spec_from_file_location("script", ROOT / path)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def make_task(request, load_script, monkeypatch):
    """The script that makes the task of the recipe that a file of tests names; it imports what lies beside it."""
    monkeypatch.syspath_prepend(request.module.RECIPE.parent)
    return load_script(request.module.RECIPE.with_name("make_task.py"))


@pytest.fixture
def reader(request, load_script):
    """The script that reads the runs of that recipe."""
    (script,) = request.module.RECIPE.parent.glob("read_*.py")
    return load_script(script)


@pytest.fixture
def executable(tmp_path):
    """Write a command that does what a few lines of shell say."""

    def write(name: str, script: str):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def run_alone(tmp_path, executable):
    """Run a script, alone in a tree of its own, with a python of shell lines; return what it printed, by lines."""

    def run(script: str, python: str, *overrides: str, **environment: str) -> list[str]:
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / script, tmp_path / script)
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(executable("python", python)), **environment}
        command = ["bash", tmp_path / script, *overrides]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.replace("-m verl_precision.cli ", "") for line in done.stdout.splitlines()]

    return run


@pytest.fixture
def write_run(tmp_path, write_rows):
    """Write the metrics of a run, a mapping for each step, where a comparison has those of an arm and a seed."""

    def write(arm: str, seed: int, rows) -> None:
        folder = tmp_path / arm / f"seed_{seed}"
        folder.mkdir(parents=True)
        write_rows(folder / "metrics.jsonl", [{"step": step, "data": row} for step, row in enumerate(rows, 1)])

    return write
