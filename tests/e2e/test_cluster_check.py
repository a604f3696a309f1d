"""Two Ray nodes on loopback: each is checked before the start, and a recipe trains on both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.runs.read import read_metrics

SCRIPT = ["bash", "recipes/launch/cpu_2nodes.sh", "recipes/sanity/sanity.yaml"]


@pytest.fixture
def environment(tmp_path):
    ray = Path(sys.executable).with_name("ray")
    return {
        **os.environ,
        "RAY": str(ray),
        "PYTHON": sys.executable,
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "PORT": "26479",
    }


def test_nodes_are_checked_and_a_recipe_trains_on_both(environment, tmp_path):
    done = subprocess.run(
        [
            *SCRIPT,
            *("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.logger=[console,file]"),
            *(f"hydra.run.dir={tmp_path / 'hydra'}", f"trainer.default_local_dir={tmp_path / 'checkpoints'}"),
            "actor_rollout_ref.actor.fsdp_config.loss_scale.initial=1024",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("plugin: loaded") == 2 and done.stdout.count("versions: python") == 2
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
