"""The rollout follows the trainer, or the run stops and says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.base.errors import RunFailedError
from verl_precision.tools.runs.launch import WORKER_PYTHON, run_verl
from verl_precision.tools.runs.read import read_metrics

QUICKSTART = Path("recipes/quickstart/quickstart.yaml")

# FP32: vLLM repacks linear weights for its FP32 kernel on every x86 CPU; for 16-bit kernels it depends on the CPU.
TIED = ("tiny_architecture=qwen3_tied", "precision=fp32")


@pytest.mark.matrix
def test_tied_model_trains_where_ray_starts_the_workers(tmp_path, monkeypatch):
    """As it does for users; the other tests have a fork server. The tied model with one: test_truncated_sampling.py."""
    monkeypatch.delenv(WORKER_PYTHON)
    settings = (*TIED, "trainer.total_training_steps=4", "ray_kwargs.ray_init.num_cpus=7")  # the preflight asks for 7
    run_verl(QUICKSTART, settings, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4
    assert rows[-1]["mismatch/probs_pearson"] > 0.99
    assert rows[-1]["mismatch/log_prob_gap_abs_mean"] < 1e-4
    assert rows[-1]["response_length/mean"] < rows[0]["response_length/mean"]
    for row in rows:  # of the sync that gave this step's rollout its weights
        assert row["weight_sync/verified_layers"] > 20 and row["weight_sync/unverified_layers"] == 0
        assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]
        assert row["weight_sync/seconds"] > 0


# A module that every process of a run imports.
CHANGE_AFTER_THE_GUARD = """
import wrapt
def change(module):
    execute = module.Worker.execute_model
    def change_and_execute(self, *args, **kwargs):
        if self._sync_index == 2 and not hasattr(self, 'changed'):  # syncs 0 and 1 are done
            self.changed = True
            self.model_runner.model.model.norm.weight.data.mul_(50)
        return execute(self, *args, **kwargs)
    module.Worker.execute_model = change_and_execute
wrapt.register_post_import_hook(change, 'vllm.v1.worker.gpu_worker')
"""


# Shorter: test_planted_faults.py for a guard that stops its run, tests/weight_sync/test_known_faults.py for the bound.
@pytest.mark.matrix
def test_a_canary_that_finds_other_weights_stops_the_run(run_quickstart, tmp_path, monkeypatch):
    """After the guard has looked, so that every bit arrived. A stale head: tests/weight_sync/test_worker.py."""
    words = "Canary of weight sync 1: replica 0: its served log-probs differ"
    (tmp_path / "planted.py").write_text(CHANGE_AFTER_THE_GUARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "planted")
    with pytest.raises(RunFailedError, match=words) as caught:
        run_quickstart("precision=bf16", "trainer.total_training_steps=3")
    assert "Weight sync 1 did not take" not in str(caught.value)


@pytest.mark.matrix
def test_without_the_repair_a_tied_head_is_stale_and_the_guard_names_it(tmp_path):
    """The recipe's script; six steps. Without the guard the run ends with exit code 0, and its engines differ."""
    command = ["bash", "recipes/tied_head/run_sync_qwen3_cpu.sh", "trainer.total_training_steps=6"]
    subprocess.run(command, check=True, env={**os.environ, "OUTPUT": str(tmp_path), "PYTHON": sys.executable})
    files = {path.parent.name: path for path in tmp_path.glob("tied_head/*/*/metrics.jsonl")}
    equal = {arm: [row["mismatch/probs_pearson"] for row in read_metrics(path)] for arm, path in files.items()}
    assert {arm: len(steps) for arm, steps in equal.items()} == {"repaired": 6, "unguarded": 6}
    assert min(equal["repaired"]) > 0.99 and max(equal["unguarded"]) < 0.5
    (log,) = tmp_path.glob("tied_head/*/guarded/train.log")
    assert "Weight sync 0 did not take: lm_head: its kernel computes with a packed copy" in log.read_text()


@pytest.mark.matrix
def test_a_draft_that_fsdp_does_not_train_is_rejected_and_the_samples_are_the_policys(run_quickstart):
    mtp = [f"actor_rollout_ref.model.mtp.{key}=True" for key in ("enable", "enable_rollout")]
    rows = run_quickstart("precision=fp32", "tiny_architecture=glm4_moe", *mtp, "trainer.total_training_steps=6")
    assert rows[-1]["alarm/active_count"] == 1  # draft_rejected
    for row in rows[1:]:  # a draft of random numbers hits one token in 101
        assert row["weight_sync/draft_acceptance"] < 0.05 and row["mismatch/k3_kl"] < 1e-10
        assert row["weight_sync/draft_layers_unchanged"] == row["weight_sync/draft_layers"] == 10
