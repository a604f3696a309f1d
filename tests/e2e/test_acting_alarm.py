"""A run whose alarm acts: the rescue is bit for bit what its checkpoint gives."""

import pytest
import yaml
from test_resume import REPEATABLE, differing

from verl_precision.tools.actions.rescue import RESCUE_FILE
from verl_precision.tools.runs.read import read_metrics

STEPS = 5
SETTINGS = ("precision=bf16", "trainer.save_freq=1", f"trainer.total_training_steps={STEPS}", *REPEATABLE)
# A trouble of one's own, in the trainer's process: an alarm that is there from step 3 on.
TROUBLE = """
import wrapt
def plant(module):
    decide = module.Remedy.decide
    module.Remedy.decide = lambda self, step, active: decide(
        self, step, {"low_effective_sample_size": 3} if step >= 3 else {}
    )
wrapt.register_post_import_hook(plant, 'verl_precision.tools.actions.rescue')
"""


@pytest.fixture(autouse=True)
def trouble(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(TROUBLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "planted")


@pytest.mark.matrix
def test_what_follows_is_what_the_checkpoint_gives_in_fp16(run_quickstart, tmp_path):
    folder = tmp_path / "run"
    act = ("mismatch.alarm.on_alarm=rescue", "+mismatch.alarm.action_patience=2")
    rescued = run_quickstart(*SETTINGS, *act, f"trainer.default_local_dir={folder}", "trainer.experiment_name=run")
    found = yaml.safe_load((tmp_path / "run-rescue" / RESCUE_FILE).read_text())
    assert (found["step"], found["since_step"], found["name"]) == (4, 3, "run-rescue")
    assert found["checkpoint"] == str(folder / "global_step_2")
    assert [row["step"] for row in rescued] == [1, 2, 3, 4, 5], "one series: up to the checkpoint the parent's"
    assert all("precision/loss_scale" not in row for row in rescued[:2])
    superseded = read_metrics(rescued.folder / "metrics.jsonl.superseded")
    assert [row["step"] for row in superseded] == [3, 4] and superseded[1]["alarm/rescue"] == 0

    by_hand = run_quickstart(
        *(each for each in SETTINGS if each != "precision=bf16"),
        *("precision=fp16", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={found['checkpoint']}"),
        *(f"trainer.default_local_dir={tmp_path / 'by_hand'}", "trainer.experiment_name=by_hand"),
    )
    assert [row["step"] for row in by_hand] == [3, 4, 5]
    assert [row.pop("alarm/rescue") for row in rescued] == [0, 0, 1, 1, 1], "the page shows where it began"
    assert differing(by_hand, rescued[2:]) == [set()] * 3, "bit for bit"
    assert (tmp_path / "run-rescue" / f"global_step_{STEPS}").is_dir() and (folder / "global_step_4").is_dir()
