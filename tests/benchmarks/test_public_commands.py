"""The collector of other repositories' commands: scripts run, what they call does not; and the judge of `check`."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text())


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Commands by script, what was said, and a folder that a script tried to empty."""
    checkout, outside = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("outside")
    (outside / "file").write_text("kept")
    (checkout / "examples").mkdir()
    for name, text in SCRIPTS.items():
        (checkout / "examples" / name).write_text(text.replace("OUTSIDE", str(outside)))
    options = ["--name", "house v1", "--seconds", "2", "--set", "MODEL_PATH=/data/model"]
    script = [sys.executable, BENCHMARKS / "public_commands.py", checkout, *options]
    start = time.monotonic()
    said = subprocess.run(script, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 30
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert {line["source"].split("/")[0] for line in lines} == {"house v1 examples"}
    assert sorted(path.name for path in (checkout / "examples").iterdir()) == sorted(SCRIPTS)
    return {line["source"].rpartition("/")[2]: line["words"] for line in lines}, said.stderr, outside


MAIN = "verl.trainer.main_ppo"


def test_a_scripts_command_is_its_words_whatever_stands_around_it(collected):
    commands, said, outside = collected
    files = "data.train_files=['/home/user/a b.parquet', 'c.parquet']"
    assert commands["quotes.sh"] == ["python3", "-m", MAIN, files, "trainer.experiment_name=two\nlines"]
    assert commands["ray_job.sh"][:3] == ["ray", "job", "submit"]
    assert commands["ray_job.sh"][-4:] == ["python3", "-m", MAIN, "trainer.nnodes=2"]
    assert commands["removes.sh"] == ["python", "-u", "-m", MAIN, "trainer.nnodes=1"]
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("file", "kept")], "nothing was removed"
    assert commands["hangs.sh"][-1] == "trainer.nnodes=3" and "hangs.sh: ended after 2 s" in said
    assert commands["asks.sh"][-1] == "actor_rollout_ref.model.path=/data/model"
    assert "Scripts without one: 1\n  house v1 examples/fails.sh" in said and "fails.sh" not in commands
    assert "other.sh" not in said, "it names no main"


def test_the_judge_names_what_the_check_does_not(monkeypatch):
    """With the preset's own YAML: a difference is silent unless a finding has its setting, or its name in the words."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from check_commands import differences, names, preset_settings
    from composer import compose_verl

    settings = preset_settings()
    assert settings["algorithm.adv_estimator"] == "rloo" and settings["actor_rollout_ref.rollout.dtype"] == "float16"
    words = ["actor_rollout_ref.rollout.name=vllm", "+precision=fp16", "+estimator=pg_seq_is"]
    assert list(differences(compose_verl(*words))) == []
    changed = compose_verl(*words, "algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token")
    assert [key for key, *_ in differences(changed)] == [
        "algorithm.adv_estimator", "algorithm.rollout_correction.rollout_is"
    ]  # fmt: skip
    finding = dict.fromkeys(("setting", "problem", "allowed", "remedy"), "")
    assert not names(finding, "algorithm.adv_estimator")
    assert names({**finding, "setting": "algorithm.adv_estimator"}, "algorithm.adv_estimator")
    assert names({**finding, "remedy": "Leave out adv_estimator=grpo."}, "algorithm.adv_estimator")
