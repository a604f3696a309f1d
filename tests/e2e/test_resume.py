"""kill -9 in mid-run, then the same command again: the loss scale and its growth counter go on exactly."""

import signal
from pathlib import Path

from verl_precision.errors import RunFailedError
from verl_precision.runs.launch import run_verl
from verl_precision.runs.read import read_metrics

RECIPE = Path("recipes/quickstart/quickstart.yaml")
SCALE = "actor_rollout_ref.actor.fsdp_config.loss_scale"


def test_killed_run_goes_on_with_its_loss_scale(tmp_path, own_processes):
    overrides = [
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "trainer.total_training_steps=6",
        f"{SCALE}.initial=1024",
        f"{SCALE}.growth_interval=4",
    ]
    killed = []

    def kill_after_two_steps(progress):
        if progress.step >= 2 and not killed:
            killed.extend(own_processes())
            for process in killed:
                process.send_signal(signal.SIGKILL)

    try:
        run_verl(RECIPE, overrides, tmp_path / "killed", kill_after_two_steps)
    except RunFailedError:
        pass
    assert len(killed) > 3, "driver, Ray, trainer, rollout"
    run_verl(RECIPE, overrides, tmp_path / "resumed", lambda progress: None)

    before = read_metrics(tmp_path / "killed" / "metrics.jsonl")
    after = read_metrics(tmp_path / "resumed" / "metrics.jsonl")
    assert 2 <= len(before) < 6
    # a checkpoint is written before the step's metrics, so that at most one more step has been saved than logged
    assert after[0]["step"] - before[-1]["step"] in (1, 2) and after[-1]["step"] == 6
    for row in before + after:
        assert row["precision/skipped_steps"] == 0
        grown = row["step"] // 4  # after the 4th update without overflow, whoever made it
        assert row["precision/loss_scale"] == 1024 * 2**grown
    assert after[-1]["precision/loss_scale"] == 2048
