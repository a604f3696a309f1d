"""A rescue: what it goes on from, its command, and who goes on with it; a real one: tests/e2e/test_acting_alarm.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rubbish import FOREIGN, cut, flipped

from verl_precision.base.errors import CheckpointStateError
from verl_precision.integration.trainer.checkpoints import RESCUE_FILE
from verl_precision.tools.actions import rescue
from verl_precision.tools.actions.rescue import Action, Rescue

ACTION = Action("low_effective_sample_size", 12, 6)
GIVEN = ["--config-name", "collapse", "precision=bf16", "logit_size=100", "+mismatch.alarm.on_alarm=rescue"]


def config(folder: Path, on_alarm: str = "rescue"):
    return OmegaConf.create({
        "trainer": {"default_local_dir": str(folder), "experiment_name": "bf16"},
        "actor_rollout_ref": {"actor": {"checkpoint": {"load_contents": ["model", "optimizer", "extra"]}}},
        "mismatch": {"alarm": {"on_alarm": on_alarm}},
    })  # fmt: skip


def checkpoint(folder: Path, step: int, whole: bool = True) -> Path:
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    for part in ("model", "optim", "extra_state") if whole else ("model",):
        torch.save(step, actor / f"{part}_world_size_1_rank_0.pt")
    torch.save(step, actor.parent / "data.pt")
    return actor.parent


def test_it_goes_on_from_the_newest_whole_checkpoint_before_the_trouble(tmp_path):
    run = tmp_path / "bf16"
    paths = {step: checkpoint(run, step, whole=step != 5) for step in (3, 4, 5, 6, 9)}
    assert rescue.of_run(config(run)) is None
    found = rescue.decide_rescue(config(run), ACTION)
    assert found.checkpoint == str(paths[4]) and (paths[4] / "KEEP").is_file(), "5 is half, 6 is of the trouble"
    assert found.folder == f"{run}-rescue" and found.name == "bf16-rescue"
    assert rescue.of_run(config(run)) == found and (Path(found.folder) / RESCUE_FILE).is_file()
    assert rescue.of_run(config(run, "log")) is None, "the rescue itself, or who wants the parent back"


@pytest.fixture
def decided(tmp_path) -> Rescue:
    checkpoint(tmp_path / "bf16", 4)
    return rescue.decide_rescue(config(tmp_path / "bf16"), ACTION)


def read(words: Sequence[str]) -> dict[str, object]:
    """Return what Hydra reads in overrides, each key once."""
    parsed = OverridesParser.create().parse_overrides(words)
    values = {each.key_or_group: each.value() for each in parsed}
    assert len(values) == len(parsed)
    return values


def test_its_command_is_the_parents_with_each_setting_once(decided, tmp_path):
    words = rescue.arguments(GIVEN, decided, chosen=["precision", "estimator"])
    assert words[:3] == ["--config-name", "collapse", "logit_size=100"] and "precision=fp16" in words
    assert "+precision=fp16" in rescue.arguments(["+precision=bf16"], decided, chosen=["estimator"])
    values = read(words[2:])
    assert values["mismatch.alarm.on_alarm"] == "log"
    assert values["trainer.resume_from_path"] == decided.checkpoint and values["trainer.resume_mode"] == "resume_path"
    assert values["trainer.experiment_name"] == "bf16-rescue"
    (tmp_path / "new" / "global_step_8").mkdir(parents=True)
    anew = rescue.decide_rescue(config(tmp_path / "new"), ACTION)  # no checkpoint is from before the trouble
    checkpoint(Path(decided.folder), 7)  # which is the rescue's own
    for each in (anew, decided):
        values = read(rescue.arguments(GIVEN, each, chosen=["precision"])[2:])
        assert values["trainer.resume_mode"] == "auto" and "trainer.resume_from_path" not in values


def test_a_file_cut_short_or_with_another_bit_is_refused_or_says_the_same(decided):
    """A letter of it is another folder."""
    asked, file = config(Path(decided.parent)), Path(decided.parent) / RESCUE_FILE
    content = file.read_bytes()
    for damaged in (*cut(content), *flipped(content, bits=1)):
        file.write_bytes(damaged)
        try:
            assert rescue.of_run(asked) == decided, damaged
        except CheckpointStateError as refused:
            assert str(file) in str(refused) and "remove rescue.yaml" in str(refused)


FIELDS = {"parent": "p", "alarm": "a", "step": 3, "since_step": 2, "checkpoint": None, "precision": "fp16", "name": "n"}
FIELDS |= {"folder": "f"}


@pytest.mark.parametrize("content", [*FOREIGN.values(), *(yaml.safe_dump(FIELDS | change).encode() for change in (
    {"checksum": "crc32 00000000"}, {"new": 1}, {"precision": "fp8"},
    {"step": "3"}, {"step": 3.0}, {"name": None}, {"checkpoint": 4}, {"folder": []},
))], ids=lambda content: repr(content[-24:]))  # fmt: skip
def test_rubbish_ends_the_start_of_its_parent_and_its_own(tmp_path, content):
    (tmp_path / RESCUE_FILE).write_bytes(content)
    for ask in (rescue.of_run, rescue.is_rescue):
        with pytest.raises(CheckpointStateError, match=r"rescue\.yaml cannot be read"):
            ask(config(tmp_path))
    (tmp_path / RESCUE_FILE).write_text(yaml.safe_dump(FIELDS))  # one that is mended by hand needs no checksum
    assert rescue.of_run(config(tmp_path)) == Rescue(**FIELDS)


@pytest.mark.parametrize(
    "name", ["Läufe", "实验", "it's", 'a "b"', "pbs.12[3]", "a,b=c {d}", "back\\slash\\", "new\nline"]
)
def test_it_goes_where_it_belongs_whatever_the_folder_is_called(tmp_path, name):
    checkpoint(tmp_path / name, 4)
    values = read(rescue.arguments([], rescue.decide_rescue(config(tmp_path / name), ACTION), chosen=[]))
    assert values["trainer.default_local_dir"] == f"{tmp_path / name}-rescue"
    assert values["trainer.resume_from_path"] == str(tmp_path / name / "global_step_4")
