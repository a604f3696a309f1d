"""`make real` in a short form: a pre-trained model of the package index, its set, two steps in each precision.

For `make test-matrix`, since it takes twelve minutes of a slow core. Its parts have tests of their own: the conversion
(tests/tools/data/test_smollm2.py), the script's words (tests/recipes/test_smollm2_recipe.py), a sanity set and both
precisions on the tiny model (test_sanity_set.py, test_quickstart.py).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.tools.runs.read import read_metrics

RECIPE = Path("recipes/smollm2")
SCRIPT = "run_reasoning_gym_smollm2_135m_fsdp2.sh"
RESPONSES, PROMPTS = 4, 4
SHORTEST = {"LEVELS": "0", "RESPONSES": str(RESPONSES), "PARALLEL": "1", "PYTHON": sys.executable}
SHORTEST |= {"PROBLEMS": "16", "PRECISIONS": "bf16 fp16"}


@pytest.mark.matrix
def test_fp16_closes_the_gap_of_a_pre_trained_model(tmp_path):
    """In FP16 k3 was 1e-5 to 4e-5, and 5e-4 to 1.2e-3 in BF16 (docs/log/real_model.md).

    The script runs in a tree of its own, for a user's results are not touched."""
    shutil.copytree(RECIPE, tmp_path / RECIPE)
    sizes = ("trainer.total_training_steps=2", f"data.train_batch_size={PROMPTS}", "trainer.save_freq=-1")
    sizes += (f"actor_rollout_ref.rollout.n={RESPONSES}",)
    subprocess.run(["bash", tmp_path / RECIPE / SCRIPT, *sizes], check=True, env=os.environ | SHORTEST)
    outputs = tmp_path / "outputs" / "smollm2"
    found = json.loads((outputs / "set" / "summary.json").read_text())["summary"]
    assert PROMPTS <= found["kept"] < found["rows"], "some of the problems are solved sometimes"
    (page,) = outputs.glob("*/report.html")
    metrics = {name: read_metrics(page.parent / name / "seed_0" / "metrics.jsonl") for name in ("bf16", "fp16")}
    for row in (*metrics["bf16"], *metrics["fp16"]):
        assert row["weight_sync/canary_gap"] < 0.5 * row["weight_sync/canary_bound"]
        assert row["alarm/active_count"] == 0
    assert len(metrics["bf16"]) == 2
    for coarse, fine in zip(metrics["bf16"], metrics["fp16"], strict=True):
        assert coarse["mismatch/k3_kl"] > 20 * fine["mismatch/k3_kl"]
