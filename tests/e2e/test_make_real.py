"""`make real` in its shortest form: a pre-trained model of the package index, its set, two steps in each precision."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.tools.runs.read import read_metrics

RECIPE = Path("recipes/smollm2")
SCRIPT = "run_reasoning_gym_smollm2_135m_fsdp2.sh"
SHORTEST = {"LEVELS": "0", "PROBLEMS": "16", "RESPONSES": "4", "PARALLEL": "1"}
STEPS, PROMPTS, RESPONSES = 2, 4, 4


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Run the script in a tree of its own, and return that: results of a user are not touched."""
    tree = tmp_path_factory.mktemp("real")
    shutil.copytree(RECIPE, tree / RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SHORTEST, "PYTHON": sys.executable}.items():
            patch.setenv(name, value)
        sizes = (f"trainer.total_training_steps={STEPS}", f"data.train_batch_size={PROMPTS}", "trainer.save_freq=-1")
        sizes += (f"actor_rollout_ref.rollout.n={RESPONSES}",)
        subprocess.run(["bash", tree / RECIPE / SCRIPT, *sizes], check=True)
    return tree


def test_model_set_and_both_precisions_in_one_command(tree):
    outputs = tree / "outputs" / "smollm2"
    found = json.loads((outputs / "set" / "summary.json").read_text())["summary"]
    assert PROMPTS <= found["kept"] < found["rows"], "some of the problems are solved sometimes"
    (page,) = outputs.glob("*/report.html")
    bf16, fp16 = (read_metrics(page.parent / precision / "seed_0" / "metrics.jsonl") for precision in ("bf16", "fp16"))
    assert len(bf16) == len(fp16) == STEPS
    for coarse, fine in zip(bf16, fp16, strict=True):
        assert coarse["mismatch/k3_kl"] > 20 * fine["mismatch/k3_kl"]
        for row in (coarse, fine):
            assert row["weight_sync/canary_gap"] < 0.5 * row["weight_sync/canary_bound"]
            assert row["alarm/active_count"] == 0
