"""`repeatable=bitwise`: a run that was killed and resumed has the weights of one that was not, bit for bit.

`make test-e2e` shows the same of two ranks with two replicas, in test_resume.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from same_run import differing

from verl_precision.tools.runs.read import read_metrics

STEPS = 2


def command(output: Path) -> list[str]:
    words = ["compare", "recipes/quickstart/quickstart.yaml", "-p", "fp16", "--output", str(output)]
    words += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    return [sys.executable, "-m", "verl_precision.cli", *words, "+repeatable=bitwise", "actor_rollout_ref.rollout.n=4"]


@pytest.mark.matrix
def test_a_run_that_was_killed_equals_one_that_was_not(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    subprocess.run(command(straight), check=True, capture_output=True)
    with subprocess.Popen(command(killed), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if "step 1/" in line:
                first.kill()
    again = subprocess.run(command(killed), check=True, capture_output=True, text=True)
    assert "goes on in" in again.stdout

    one, other = (read_metrics(next(folder.glob("quickstart/*/fp16/metrics.jsonl"))) for folder in (straight, killed))
    assert [row["step"] for row in other] == list(range(1, STEPS + 1))
    assert len({row["weight_sync/weights_digest"] for row in one}) == STEPS, "the weights change"
    assert differing(one, other) == [set()] * STEPS
