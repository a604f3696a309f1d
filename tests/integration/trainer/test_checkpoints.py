"""Checkpoints of earlier starts: verl's own functions resume from them and remove them, after ours have looked."""

import shutil

import pytest
import torch
from composer import compose_verl
from omegaconf import DictConfig
from rubbish import FOREIGN
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, find_latest_ckpt_path

from verl_precision.base.errors import CheckpointStateError
from verl_precision.integration.trainer import checkpoints
from verl_precision.integration.trainer.checkpoints import TRACKER, adopt_earlier, is_complete, mend_tracker

SHARDS = [f"{content}_world_size_2_rank_{rank}.pt" for content in ("model", "optim", "extra_state") for rank in (0, 1)]
HALF = {
    "no data.pt": lambda path: (path / "data.pt").unlink(),
    "half of data.pt": lambda path: cut(path / "data.pt"),
    "a rank is missing": lambda path: (path / "actor" / SHARDS[1]).unlink(),
    "half of a shard": lambda path: cut(path / "actor" / SHARDS[2]),
    "optimizer removed": lambda path: [file.unlink() for file in path.glob("actor/optim_*")],
    "actor removed": lambda path: shutil.rmtree(path / "actor"),
}


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def save(folder, step):
    """Write what verl's FSDP engine and trainer write, with two ranks."""
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    for name in ("data.pt", *(f"actor/{shard}" for shard in SHARDS)):
        torch.save({"step": step}, path / name)
    return path


@pytest.fixture
def folder(tmp_path):
    """The run's folder: two complete checkpoints, and one that a kill has left half-written."""
    for step in (20, 100, 120):
        path = save(tmp_path, step)
    HALF["no data.pt"](path)
    (tmp_path / "global_step_x").mkdir()
    return tmp_path


@pytest.fixture
def config(folder) -> DictConfig:
    return compose_verl("+precision=fp16", "algorithm.adv_estimator=grpo", f"trainer.default_local_dir={folder}")


@pytest.mark.parametrize("damage", HALF)
def test_half_a_checkpoint_is_told_from_a_whole_one(tmp_path, damage):
    path = save(tmp_path, 1)
    assert is_complete(path) and not is_complete(path, roles=("actor", "critic"))
    HALF[damage](path)
    assert not is_complete(path)
    assert is_complete(path, contents=["model", "hf_model"]) is (damage in ("half of a shard", "optimizer removed"))


@pytest.mark.parametrize("said", [None, "", *"140 120 words -3 100.0 \u0661\u0660\u0660 ²".split(), "1" + "0" * 400])
def test_an_unusable_tracker_names_the_newest_complete_checkpoint_and_this_is_said(config, folder, said, caplog):
    """verl alone: ValueError, or from scratch beside an intact checkpoint, or from half a one."""
    if said is not None:
        (folder / TRACKER).write_text(said)
    mend_tracker(config)
    assert find_latest_ckpt_path(str(folder)) == str(folder / "global_step_100")
    assert "complete checkpoint, global_step_100 (not complete: global_step_120)" in caplog.text
    assert ("is not there" if said is None else f"says {said[:20]!r}"[:-1]) in caplog.text
    assert not list(folder.glob(".*")), "written at once, or not at all"


def test_an_asynchronous_run_goes_on_where_the_prompts_under_way_are(config, folder, caplog):
    """verl alone forgets them without a word. A tracker that names a complete checkpoint is left alone."""
    (folder / TRACKER).write_text("100\n")
    config.trainer.v1.trainer_mode = "vp_colocate_async"
    (folder / "global_step_20" / "transfer_queue").mkdir()
    mend_tracker(config)
    assert (folder / TRACKER).read_text() == "100\n" and not caplog.text
    (folder / TRACKER).unlink()
    mend_tracker(config)
    assert find_latest_ckpt_path(str(folder)) == str(folder / "global_step_20")


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_rubbish_tracker_is_mended_where_that_can_be_and_else_refused(config, folder, content):
    (folder / TRACKER).write_bytes(content)
    if len(content) < 1 << 20:
        mend_tracker(config)
        assert (folder / TRACKER).read_text() == "100"
    for step in (20, 100):
        shutil.rmtree(folder / f"global_step_{step}")
    for name in ("global_step_\u0663", "global_step_03", "global_step_" + "9" * 200):
        (folder / name).mkdir()
    (folder / TRACKER).write_bytes(content)
    with pytest.raises(CheckpointStateError) as refused:
        mend_tracker(config)
    assert str(folder / TRACKER) in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("change", ["trainer.resume_mode=disable", "actor_rollout_ref.actor.strategy=megatron"])
def test_where_verl_does_not_resume_by_it_or_another_engine_saves_nothing_is_touched(config, folder, change):
    config.merge_with_dotlist([change])
    mend_tracker(config)
    assert not (folder / TRACKER).exists()


def test_without_a_complete_checkpoint_a_run_begins_from_scratch_only_where_none_was_named(config, folder, caplog):
    for step in (20, 100):
        shutil.rmtree(folder / f"global_step_{step}")
    mend_tracker(config)
    assert "no checkpoint is complete (global_step_120), and the run begins from scratch" in caplog.text
    (folder / TRACKER).write_text("100")
    with pytest.raises(CheckpointStateError, match=r"says '100'.*global_step_120.*resume_mode=disable"):
        mend_tracker(config)


@pytest.fixture
def saved(folder):
    """A function that saves a step as verl's engine does after ours has looked, and returns the steps that are left."""
    manager = object.__new__(BaseCheckpointManager)
    manager.previous_saved_paths, manager.checkpoint_load_contents = [], ["model", "optimizer", "extra"]

    def save_next(step: int, keep: int | None) -> list[int]:
        actor = str(folder / f"global_step_{step}" / "actor")
        adopt_earlier(manager, actor, keep)
        manager.ensure_checkpoint_capacity(keep)
        save(folder, step)
        manager.register_checkpoint(actor, keep)
        return [step for step, path in checkpoints.checkpoints_in(folder).items() if (path / "actor").exists()]

    return save_next


def test_checkpoints_of_earlier_starts_are_removed_in_verls_order_half_ones_first(folder, saved):
    """Marked ones stay, an own one as well, and later ones, of steps that are done again."""
    (save(folder, 40) / "KEEP").touch()
    (save(folder, 60) / "data.pt").unlink()
    assert saved(110, keep=3) == [20, 40, 100, 110, 120]
    (folder / "global_step_110" / "KEEP").touch()
    assert [saved(115, keep=3), saved(116, keep=3), saved(117, keep=3)] == [
        [20, 40, 100, 110, 115, 120], [40, 100, 110, 115, 116, 120], [40, 110, 115, 116, 117, 120]
    ]  # fmt: skip


@pytest.mark.parametrize(("keep", "first", "then"), [
    (1, [100, 110, 120], [115, 120]),
    (2, [100, 110, 120], [110, 115, 120]),
    (None, [20, 100, 110, 120], [20, 100, 110, 115, 120]),
])  # fmt: skip
def test_the_checkpoint_that_a_run_goes_on_from_outlives_the_saving_of_the_next(saved, keep, first, then):
    assert (saved(110, keep=keep), saved(115, keep=keep)) == (first, then)


@pytest.mark.parametrize(("step", "kept"), [(110, 100), (100, 20), (1000, 120), (7, 20)])
def test_the_newest_before_the_step_is_marked_once(folder, step, kept):
    for _ in range(2):
        checkpoints.keep_checkpoint_before(step, folder)
    (mark,) = folder.glob(f"*/{checkpoints.MARK}")
    assert mark.parent.name == f"global_step_{kept}" and f"began at step {step}." in mark.read_text()
    checkpoints.keep_checkpoint_before(step, folder / "absent")
