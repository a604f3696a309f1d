"""Pristine trees unpacked from the released packages, fetched by pip once and kept outside the repository."""

import functools
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from verl_precision.patching.change import change_tree
from verl_precision.patching.series import State

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "verl-precision" / "releases"
# pip's own words when no index answers, as opposed to an index that lacks the release
UNREACHABLE = re.compile(r"from versions: none\)|Connection to .* failed|Temporary failure in name resolution")


def _fetch(version: str) -> Path:
    wheel = CACHE / f"verl-{version}-py3-none-any.whl"
    if not wheel.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        done = subprocess.run(
            [*pip, "--timeout", "15", "-d", str(CACHE), f"verl=={version}"], capture_output=True, text=True, timeout=180
        )
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip(
                f"verl {version} cannot be fetched, no package index is reachable: {done.stderr.strip()[-200:]}"
            )
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
def pristine(unpack: Callable[[str], Path]) -> Callable[[str], Path]:
    """The release, unpacked once; its files stay what they are."""
    return functools.cache(unpack)


@pytest.fixture(scope="session")
def patched(unpack: Callable[[str], Path]) -> Callable[[str], Path]:
    """The release with its series applied, made once."""

    @functools.cache
    def get(version: str) -> Path:
        folder = unpack(version)
        change_tree(folder, State.APPLIED)
        return folder

    return get


@pytest.fixture(scope="session")
def run_in() -> Callable[..., subprocess.CompletedProcess]:
    """Run Python with a tree's verl, and without our plugin, which is for 0.9 alone."""

    def run(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        paths = os.pathsep.join([str(tree), str(Path(__file__).parent)])
        settings = {"PYTHONPATH": paths, "VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env={**os.environ, **settings, "OMP_NUM_THREADS": "2", **environment},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return run


@pytest.fixture(scope="session")
def outcomes(run_in) -> Callable[..., dict[str, str]]:
    """Run pytest with a tree's verl; return passed, failed or error by the name of each test."""

    def run(tree: Path, *arguments: str, **environment: str) -> dict[str, str]:
        options = ["-q", "-rA", "--noconftest", "--rootdir", str(tree), "-p", "no:cacheprovider", "-W", "ignore"]
        done = run_in(
            tree, "-m", "pytest", *options, "--tb=no", "--continue-on-collection-errors", *arguments, **environment
        )
        found = re.findall(r"^(PASSED|FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
        assert found, done.stdout[-3000:] + done.stderr[-3000:]
        return {name.split("/")[-1].removeprefix("::"): outcome.lower() for outcome, name in found}

    return run
