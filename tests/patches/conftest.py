"""Pristine trees unpacked from the released packages, fetched by pip once and kept outside the repository."""

import functools
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_precision.tools.patching.series import State, change_tree
from verl_precision.tools.runs.fork_server import fork_server

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "verl-precision" / "releases"
# pip's own words when no index answers, as opposed to an index that lacks the release
UNREACHABLE = re.compile(r"from versions: none\)|Connection to .* failed|Temporary failure in name resolution")
# What every verl imports, and takes ten seconds of a core.
PRELOADED = (
    *("torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "ray", "accelerate", "datasets", "peft"),
    *("tensordict", "pandas", "hydra", "pytest"),
)
# Without our plugin, which is for 0.9 alone.
SETTINGS = {"VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _fetch(version: str) -> Path:
    wheel = CACHE / f"verl-{version}-py3-none-any.whl"
    if not wheel.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        pip += ["--timeout", "15", "-d", str(CACHE), f"verl=={version}"]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=180)
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip(f"verl {version} cannot be fetched, no package index is reachable: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
    return wheel


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpack a release into a fresh folder."""

    def run(version: str) -> Path:
        folder = tmp_path_factory.mktemp(f"verl-{version}")
        with zipfile.ZipFile(_fetch(version)) as wheel:
            wheel.extractall(folder)
        return folder

    return run


@pytest.fixture(scope="session")
def patched(unpack: Callable[[str], Path]) -> Callable[[str], Path]:
    """The release with its series applied, made once."""

    @functools.cache
    def get(version: str) -> Path:
        change_tree(folder := unpack(version), State.APPLIED)
        return folder

    return get


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Callable[..., dict[str, str]]]:
    """Run pytest in a tree, in a fork of one process that has all but verl; return each test's outcome by its name."""
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(Path(__file__).parent)}
    options = ["-q", "-rA", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no"]

    with fork_server(PRELOADED) as python:

        def run(tree: Path, *arguments: str) -> dict[str, str]:
            command = [*shlex.split(python), "-m", "pytest", *options, "--continue-on-collection-errors"]
            command += ["--rootdir", str(tree), *arguments]
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=280)
            found = re.findall(r"^(PASSED|FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
            assert found, done.stdout[-3000:] + done.stderr[-3000:]
            return {name.split("/")[-1].removeprefix("::"): outcome.lower() for outcome, name in found}

        yield run
