"""Length alone, in its shortest form: one model at two lengths, ten steps in BF16, and the gap without training."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

import pytest
from rich.console import Console

from verl_precision.mismatch.prediction import predicted_spread
from verl_precision.tools.gap.pairs import measure_mismatch
from verl_precision.tools.jobs.settings import MismatchJob
from verl_precision.tools.runs.read import read_metrics

RECIPE = Path("recipes/reasoning_length")
FIRST = 5  # steps, in which a run that will lose its order still has it: docs/log/length.md
SHORTEST = {"LENGTHS": "128 2048", "PRECISIONS": "bf16", "ESTIMATORS": "pg_seq_is", "PYTHON": sys.executable}


@pytest.mark.matrix
def test_the_spread_grows_with_the_root_of_the_length_and_nothing_is_done_twice(tmp_path):
    """Sixteen times the tokens, four times the spread: 3.9 times in both runs so far (docs/log/length.md).

    The script runs in a tree of its own, for a user's results are not touched."""
    shutil.copytree("recipes", tmp_path / "recipes")  # the teacher lies in another recipe
    command = ["bash", tmp_path / RECIPE / "run_reasoning_qwen3_cpu.sh", "trainer.total_training_steps=10"]

    def run() -> dict[int, Path]:
        subprocess.run(command, check=True, env=os.environ | SHORTEST)
        found = (tmp_path / "outputs/reasoning_length").glob("*/bf16_pg_seq_is_*/seed_0/metrics.jsonl")
        return {int(path.parts[-3].rpartition("_")[2]): path for path in found}

    files = run()
    spreads, k3 = {}, {}
    for tokens, file in files.items():
        rows = read_metrics(file)
        first = rows[:FIRST]
        assert len(rows) == 10 and min(row["response_length/mean"] for row in first) > 0.8 * tokens
        spreads[tokens] = fmean(row["mismatch/sequence_log_ratio_std"] for row in first)
        k3[tokens] = fmean(row["mismatch/k3_kl"] for row in first)
        assert 0.7 < spreads[tokens] / predicted_spread(k3[tokens], tokens + 2) < 1.4
    assert 3 < spreads[2048] / spreads[128] < 5.3 and 0.6 < k3[2048] / k3[128] < 1.6
    short = [row["critic/score/mean"] for row in read_metrics(files[128])]
    assert median(short[-5:]) > fmean(short[:3]) + 0.1, "it learns: by 0.22 to 0.30 in five runs in both precisions"

    task = tmp_path / "outputs/reasoning_length/task"
    files_of_it = {"model": str(task / "model"), "prompts": str(task / "prompts_128.jsonl"), "output": tmp_path / "job"}
    dtypes = {"rollout_dtypes": ("bf16",), "train_dtypes": ("bf16",)}
    job = MismatchJob(**files_of_it, **dtypes, responses=2, max_response_tokens=130)
    (pair,) = measure_mismatch(job, Console(quiet=True))
    assert 0.5 < pair.k3 / k3[128] < 2, "a model whose layers all have a window, without RL"

    before = {file: file.stat().st_mtime_ns for file in files.values()}
    assert run() == files and {file: file.stat().st_mtime_ns for file in before} == before
