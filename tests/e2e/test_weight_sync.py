"""The rollout follows the trainer, or the run stops and says why."""

from pathlib import Path

import pytest

from verl_precision.base.errors import RunFailedError
from verl_precision.tools.runs.launch import run_verl
from verl_precision.tools.runs.read import read_metrics

QUICKSTART = Path("recipes/quickstart/quickstart.yaml")

# FP32: vLLM repacks linear weights for its FP32 kernel on every x86 CPU; for 16-bit kernels it depends on the CPU.
TIED = ("tiny_architecture=qwen3_tied", "precision=fp32")


@pytest.mark.xdist_group("tied")
def test_tied_model_trains_and_the_rollout_follows(tmp_path):
    """Without a fork server: Ray starts the workers, as it does on GPUs."""
    # 7 logical CPUs: what the preflight says is enough.
    settings = (*TIED, "trainer.total_training_steps=4", "ray_kwargs.ray_init.num_cpus=7")
    run_verl(QUICKSTART, settings, tmp_path / "run", lambda progress: None)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4
    assert rows[-1]["mismatch/probs_pearson"] > 0.99
    assert rows[-1]["mismatch/log_prob_gap_abs_mean"] < 1e-4
    assert rows[-1]["response_length/mean"] < rows[0]["response_length/mean"]
    for row in rows:  # of the sync that gave this step's rollout its weights
        assert row["weight_sync/verified_layers"] > 20 and row["weight_sync/unverified_layers"] == 0
        assert row["weight_sync/canary_gap"] < row["weight_sync/canary_bound"]
        assert row["weight_sync/seconds"] > 0


@pytest.mark.matrix
def test_broken_sync_stops_the_run_and_names_the_layer(run_quickstart, tmp_path, monkeypatch):
    """Take the repair of tied heads away in every process: upstream's stale head, which nothing else notices.

    A guard that stops its run: test_planted_faults.py. The stale head: tests/weight_sync/test_worker.py.
    """
    (tmp_path / "break_tied_heads.py").write_text(
        "from verl_precision.integration.cpu import vllm_reload\n"
        "vllm_reload.shared_parameter_layers = lambda model: iter(())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "break_tied_heads")
    with pytest.raises(RunFailedError) as caught:
        run_quickstart(*TIED, "trainer.total_training_steps=2")
    message = str(caught.value)
    assert "Weight sync 0 did not take: lm_head: it computes with a packed copy of other weights" in message
    assert "Usual causes" in message


def test_served_log_probs_that_are_not_the_trainers_stop_the_run(run_quickstart, tmp_path, monkeypatch):
    """Change the rollout's memory after the guard has looked: every bit arrived, only the canary can tell."""
    (tmp_path / "change_after_the_guard.py").write_text(
        "import wrapt\n"
        "def change(module):\n"
        "    execute = module.Worker.execute_model\n"
        "    def change_and_execute(self, *args, **kwargs):\n"
        "        if self._sync_index == 2 and not hasattr(self, 'changed'):  # syncs 0 and 1 are done\n"
        "            self.changed = True\n"
        "            self.model_runner.model.model.norm.weight.data.mul_(50)\n"
        "        return execute(self, *args, **kwargs)\n"
        "    module.Worker.execute_model = change_and_execute\n"
        "wrapt.register_post_import_hook(change, 'vllm.v1.worker.gpu_worker')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "change_after_the_guard")
    with pytest.raises(RunFailedError) as caught:
        run_quickstart("precision=bf16", "trainer.total_training_steps=3")
    message = str(caught.value)
    assert "Canary of weight sync 1: replica 0: its served log-probs differ from the trainer's by" in message
    assert "Weight sync 1 did not take" not in message
