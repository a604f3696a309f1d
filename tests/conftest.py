"""Shared fixtures."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A test process talks to nobody: no hub, no cluster of somebody else's.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("VERL_PLATFORM", None)


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script in a clean interpreter, outside the repository, and return the completed process."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environment},
            timeout=180,
        )

    return run
