"""`repeatable=bitwise`: a run that was killed and resumed has the weights of one that was not, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.runs.read import read_metrics

RECIPE = "recipes/quickstart/quickstart.yaml"
STEPS = 3
# What a clock or the machine decides, and nothing else.
OF_THE_MACHINE = ("timing", "perf/", "weight_sync/seconds", "agent_loop/")


def command(output: Path, scale: str) -> list[str]:
    words = ["compare", RECIPE, "-p", "fp16", "--output", str(output), f"scale={scale}", "+repeatable=bitwise"]
    words += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    return [sys.executable, "-m", "verl_precision.cli", *words, "actor_rollout_ref.rollout.n=4"]


def rows(output: Path) -> list[dict[str, float]]:
    (file,) = output.glob("quickstart/*/fp16/metrics.jsonl")
    found = read_metrics(file)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    return [{key: row[key] for key in row if not key.startswith(OF_THE_MACHINE)} for row in found]


@pytest.mark.parametrize("scale", ["cpu", "cpu_2nodes"])
def test_a_run_that_was_killed_equals_one_that_was_not(scale, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    subprocess.run(command(straight, scale), check=True, capture_output=True)
    with subprocess.Popen(command(killed, scale), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if "step 2/" in line:
                first.kill()
    again = subprocess.run(command(killed, scale), check=True, capture_output=True, text=True)
    assert "goes on in" in again.stdout

    one, other = rows(straight), rows(killed)
    assert len({row["weight_sync/weights_digest"] for row in one}) == STEPS, "the weights change"
    differing = [
        {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)} for a, b in zip(one, other, strict=True)
    ]
    assert differing == [set()] * STEPS, json.dumps([sorted(keys) for keys in differing])
