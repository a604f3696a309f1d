"""Real FSDP2 ranks over gloo, real verl engines on a CPU: the tests in `ranks.py`, in 1 and in 2 processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize("world", [1, 2])
def test_ranks(world, tmp_path):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", "-p", "no:cacheprovider", str(RANKS)]
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(world)]
    shared = {"VERL_PLATFORM": "cpu", "WORLD_SIZE": str(world), "SHARED_FOLDER": str(tmp_path)}
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            environment = {**os.environ, **shared, "RANK": str(rank)}
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    try:
        codes = [process.wait(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-6000:] for log in logs)
