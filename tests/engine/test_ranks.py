"""Real FSDP2 ranks over gloo, real verl engines on a CPU: the tests in `ranks.py`, in 2 processes.

`make test-matrix` has them in one process too, which leaves out those of two; a run on one rank: tests/e2e.
"""

from pathlib import Path

import forked
import pytest

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_ranks(world, tmp_path):
    arguments = ["-x", "-q", "--noconftest", "-p", "no:cacheprovider", str(RANKS)]
    script = f"import sys, pytest\nsys.exit(pytest.main({arguments!r}))"
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(world)]
    shared = {"VERL_PLATFORM": "cpu", "WORLD_SIZE": str(world), "SHARED_FOLDER": str(tmp_path)}
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(forked.start(script, tmp_path, output, RANK=str(rank), **shared))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-6000:] for log in logs)
