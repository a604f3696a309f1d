"""The checkpoint before the trouble began outlives verl's own clearing."""

import pytest
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_precision.integration.trainer.kept_checkpoints import MARK, keep_checkpoint_before, spare_marked


@pytest.fixture
def folder(tmp_path):
    for step in (20, 40, 100):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_x").mkdir()
    return tmp_path


@pytest.mark.parametrize(("step", "kept"), [(41, 40), (40, 20), (1000, 100), (7, 20)])
def test_the_newest_before_the_step_is_marked_once(folder, step, kept):
    assert keep_checkpoint_before(step, folder) == folder / f"global_step_{kept}"
    assert str(step) in (folder / f"global_step_{kept}" / MARK).read_text()
    assert keep_checkpoint_before(step, folder) is None


def test_without_a_checkpoint_nothing_is_marked(tmp_path):
    assert keep_checkpoint_before(5, tmp_path / "absent") is None


def test_verls_manager_removes_the_others_only(folder):
    manager = object.__new__(BaseCheckpointManager)
    manager.previous_saved_paths = []
    keep_checkpoint_before(40, folder)
    for step in (20, 40, 100):
        spare_marked(manager)
        manager.ensure_checkpoint_capacity(1)
        manager.register_checkpoint(str(folder / f"global_step_{step}" / "actor"), 1)
    assert [(folder / f"global_step_{step}" / "actor").exists() for step in (20, 40, 100)] == [True, False, True]
