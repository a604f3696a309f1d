"""kill -9 in mid-run, then the same command again: loss scale, growth counter and metrics go on exactly."""

import shutil
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

    former, file = tmp_path / "killed" / "metrics.jsonl", tmp_path / "resumed" / "metrics.jsonl"
    before = read_metrics(former)
    assert 2 <= len(before) < 6
    moved = []

    def move_what_was_measured(progress):
        """At the first call, long before verl opens the file: `run_verl` has made its folder."""
        if not moved:
            moved.extend(shutil.move(path, file.parent) for path in former.parent.glob("metrics.jsonl*"))

    run_verl(RECIPE, overrides, tmp_path / "resumed", move_what_was_measured)
    rows = read_metrics(file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[: len(before)] == before or before[-1] not in rows  # a step that was not saved is done again
    assert not (file.parent / "metrics.jsonl.pending").exists()
    for row in rows:
        grown = row["step"] // 4  # after the 4th update without overflow, whoever made it
        assert row["precision/skipped_steps"] == 0 and row["precision/loss_scale"] == 1024 * 2**grown
    assert rows[-1]["precision/loss_scale"] == 2048
