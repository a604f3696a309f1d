"""The distillation recipe: a teacher that is the student, one nearby, what the arms change, and the tables."""

import json
import sys

import pytest
from composer import ROOT, compose_recipe
from verl_says import objection

from verl_precision.base.files import write_file
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.registry import find_faults
from verl_precision.tools.runs.read import read_runs
from verl_precision.tools.tiny_model import cached_tiny_model

RECIPE = ROOT / "recipes" / "distillation" / "distillation.yaml"
ARMS = compose_recipe(RECIPE).arms


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.syspath_prepend(RECIPE.parent)
    monkeypatch.delitem(sys.modules, "read_noise", raising=False)
    import read_noise

    return read_noise


@pytest.mark.parametrize("arm", ARMS)
def test_verl_takes_each_arm_and_teacher_and_trainer_have_one_precision_but_in_the_mixed_one(arm):
    config = compose_recipe(RECIPE, *ARMS[arm], return_hydra_config=True)
    found = find_faults(config, probe_environment(config), this_machine=False)
    assert not objection(config) and not [fault for fault in found if fault.severity == "error"]
    warned = {fault.name for fault in found if fault.name.startswith("teacher-")}
    assert warned == {"mixed": {"teacher-precision"}, "exact_cool": {"teacher-temperature"}}.get(arm, set())
    teacher, student = config.distillation.teacher_models.teacher_model.model_path, config.actor_rollout_ref.model.path
    assert (teacher == student) is (config.actor_rollout_ref.actor.optim.lr == 0) is not arm.startswith("near")


def test_the_script_names_the_arms_but_five_that_take_it_above_ten_minutes():
    script = RECIPE.with_name("run_teacher_qwen3_cpu.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("ARMS=")]
    more = {"mixed", "exact_cool", "bf16_topk_verls", "fp16_topk", "exact_topk"}
    named = line.partition(":-")[2].partition("}")[0].split()
    assert sorted([*named, *more]) == sorted(ARMS) and named[0].startswith("near"), "the longest first"


def test_the_table_has_twice_k3_beside_the_signal(tmp_path, reader):
    metrics = {"mismatch/k3_kl": 1e-3, "distillation/teacher_gap_square_mean": 2e-3}
    rows = [{"step": step, "data": metrics} for step in (1, 2)]
    write_file(tmp_path / "bf16" / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    runs = {run.path.parent.name: run for run in read_runs([tmp_path])}
    (row,) = [line for line in reader.table(runs).splitlines() if line.startswith("| bf16 ")]
    assert [cell.strip() for cell in row.split("|")][2:4] == ["0.002", "0.002"]


def test_a_student_is_no_distance_from_itself(reader, monkeypatch):
    folder = cached_tiny_model("qwen3")
    monkeypatch.setattr(reader, "TEACHER", folder)
    assert reader.distances({"itself": folder, "other": cached_tiny_model("qwen3_tied")}).pop("itself") == 0.0
