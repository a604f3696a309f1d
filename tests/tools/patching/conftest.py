"""A release of three files, a series of two patches for it, both made here by git."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from small_series import CONFIG, CORE, LONG, NEW, PATCHED, TEST

from verl_precision.tools.patching import tree
from verl_precision.tools.patching.series import load_series, read_patches, sha256


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `release/`, pristine, and `patches/verl-1.2.3/`."""
    folder = tmp_path_factory.mktemp("made")
    release, work, series = folder / "release", folder / "work", folder / "patches" / "verl-1.2.3"
    for path, text in {
        "verl/version/version": "1.2.3\n",
        CORE: "a = 1\r\nb = 2\n",  # an ending that a careless tool would normalise
        CONFIG: "x: 1\n" * 5,
        "tests/test_old.py": "",
    }.items():
        (release / path).parent.mkdir(parents=True, exist_ok=True)
        (release / path).write_bytes(text.encode())
    (release / CORE).chmod(0o755)
    shutil.copytree(release, work)
    git(work, "init", "-q")
    git(work, "config", "core.autocrlf", "false")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "base")
    (work / CORE).write_bytes(b"a = 10\r\nb = 2\n")
    git(work, "commit", "-qam", f"[algo] fix: a is ten, {LONG}\n\nWhy: a title longer than a line is folded")
    (work / NEW).parent.mkdir()
    for path in (CORE, CONFIG, NEW, TEST):
        (work / path).write_bytes(PATCHED[path])
    git(work, "add", "-A")
    git(work, "commit", "-qm", "[cfg] feat: x is two, c is new")
    git(work, "format-patch", "-q", "--no-signature", "-n", "-o", str(series), "HEAD~2")
    files = {path for patch in read_patches(series) for path in patch.files}
    hashes = {path: {"pristine": sha256(release / path), "patched": sha256(work / path)} for path in sorted(files)}
    (series / "hashes.json").write_text(json.dumps({"verl": "1.2.3", "files": hashes}))
    return folder


@pytest.fixture
def copy_of_release(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Make a pristine tree, tests included, in a folder of that name."""
    return lambda name: shutil.copytree(made / "release", tmp_path / name)


@pytest.fixture
def release(copy_of_release: Callable[[str], Path]) -> Path:
    """A pristine tree, tests included."""
    return copy_of_release("release")


@pytest.fixture
def series(made, tmp_path, monkeypatch):
    """The series, and the only one that the command knows."""
    found = load_series(shutil.copytree(made / "patches" / "verl-1.2.3", tmp_path / "patches" / "verl-1.2.3"))
    monkeypatch.setattr(tree, "available", lambda: {found.version: found})
    return found
