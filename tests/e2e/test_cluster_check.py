"""Two Ray nodes on loopback: each is checked before the start, a recipe trains on both, and ends with either.

With exact arithmetic, so that two ranks are seen to have no gap.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from verl_precision.base.overrides import quoted
from verl_precision.tools.runs.read import read_metrics

SCRIPT = ["bash", "recipes/launch/cpu_2nodes.sh", "recipes/sanity/sanity.yaml"]
SECONDS = 600


def test_nodes_are_checked_a_recipe_trains_on_both_and_a_lost_one_is_named(tmp_path, fork_server):
    log, metrics = tmp_path / "log", tmp_path / "metrics.jsonl"
    programs = {"RAY": str(Path(sys.executable).with_name("ray")), "PYTHON": sys.executable}
    environment = {**os.environ, **programs, "VERL_FILE_LOGGER_PATH": str(metrics), "PORT": "26479"}
    overrides = [
        *("precision=bf16", "+arithmetic=exact"),
        *("trainer.total_training_steps=50", "trainer.val_before_train=False", "trainer.logger=[console,file]"),
        *(f"hydra.run.dir={tmp_path / 'hydra'}", f"trainer.default_local_dir={tmp_path / 'checkpoints'}"),
        f"+ray_kwargs.ray_init.runtime_env.py_executable={quoted(fork_server)}",
    ]
    with log.open("wb") as sink:
        script = subprocess.Popen([*SCRIPT, *overrides], env=environment, stdout=sink, stderr=sink)
    deadline = time.monotonic() + SECONDS
    while script.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") == 2:
            break
        time.sleep(0.2)
    assert script.poll() is None, log.read_text()[-3000:]
    children = psutil.Process(script.pid).children()
    (joined,) = [child for child in children if any(word.startswith("--address=") for word in child.cmdline())]
    for process in [joined, *joined.children(recursive=True)]:
        process.kill()
    assert script.wait(SECONDS) == 75, log.read_text()[-3000:]
    said = log.read_text()
    assert said.count("plugin: loaded") == 2 and said.count("versions: python") == 2
    assert "verl_precision: the node" in said and "was lost" in said and "resumes from its last checkpoint" in said
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows][:2] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert all((row["mismatch/equal_fraction"], row["mismatch/k3_kl"]) == (1, 0) for row in rows), "in BF16"
