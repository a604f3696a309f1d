"""Real FSDP2 ranks over gloo, real verl engines on a CPU: the tests in `ranks.py`, in 2 processes.

`make test-matrix` has them in one process too, which leaves out those of two; a run on one rank: tests/e2e.
"""

from pathlib import Path

import forked
import pytest

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.e2e
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_ranks(world, tmp_path):
    arguments = ["-x", "-q", "--noconftest", "-p", "no:cacheprovider", str(RANKS)]
    script = f"import sys, pytest\nsys.path.append({str(RANKS.parents[1])!r})\nsys.exit(pytest.main({arguments!r}))"
    forked.ranks(world, lambda rank: script, tmp_path, VERL_PLATFORM="cpu", SHARED_FOLDER=str(tmp_path))
