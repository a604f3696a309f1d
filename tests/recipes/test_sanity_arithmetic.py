"""The miniature is the sanity test, smaller; its script does each step once."""

import os
import shutil
import subprocess

import pytest
from discovered import ROOT
from omegaconf import OmegaConf
from verl.utils.config import validate_config

from verl_precision.integration.recipe_config import check_recipe, compose_recipe
from verl_precision.presets import preset_names

RECIPE = ROOT / "recipes/sanity_arithmetic/sanity_arithmetic.yaml"
SCRIPT = "recipes/sanity_arithmetic/run_arithmetic_qwen3_cpu.sh"


@pytest.mark.parametrize("precision", preset_names("precision"))
def test_composes_validates_and_passes_the_check(precision, tmp_path):
    kept = tmp_path / "kept.parquet"
    kept.write_text("")  # the check asks whether it is there
    overrides = [f"precision={precision}", f"task.cpu.train={kept}", f"task.cpu.val={kept}"]
    report = check_recipe(RECIPE, overrides)
    assert report.ok and not [fault for fault in report.faults if fault.name == "check_files"]
    config = compose_recipe(RECIPE, overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.trainer.device == "cpu" and config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.trainer.experiment_name.startswith(precision)


def test_is_the_sanity_test_in_miniature():
    real, tiny = compose_recipe(ROOT / "recipes/sanity/sanity.yaml", []), compose_recipe(RECIPE, [])
    for key in (
        *("algorithm", "actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.actor.loss_agg_mode"),
        *("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high", "trainer.v1"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_epochs", "gradient_steps"),
        *("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature"),
    ):
        assert OmegaConf.select(tiny, key) == OmegaConf.select(real, key), key
    batch, responses = tiny.data.train_batch_size, tiny.actor_rollout_ref.rollout.n
    assert (batch, responses, batch // tiny.actor_rollout_ref.actor.ppo_mini_batch_size) == (64, 8, 4)
    assert tiny.hydra.runtime.choices.estimator == real.hydra.runtime.choices.estimator == "pg_seq_is"
    assert tiny.trainer.total_training_steps * batch // 260 == 5  # almost six passes: the last batch may not be full


def test_trains_on_what_its_script_makes():
    config = compose_recipe(RECIPE, [])
    assert config.data.train_files == "outputs/sanity_arithmetic/set/kept.parquet"
    assert "FOLDER=outputs/sanity_arithmetic " in (ROOT / SCRIPT).read_text()
    assert config.reward.custom_reward_function.path == "recipes/sanity_arithmetic/reward.py"
    assert config.data.max_response_length == config.actor_rollout_ref.actor.loss_scale_factor == 8


@pytest.fixture
def script(tmp_path):
    """The script alone in a tree of its own, and a python that notes its arguments and makes what it was asked for."""
    (tmp_path / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    fake = tmp_path / "python"
    fake.write_text(
        """#!/bin/sh
echo "$VERL_PLATFORM $@"
case "$1 $3" in
    *make_task.py*) mkdir -p "$2/model" && touch "$2/problems.jsonl" ;;
    *sanity-set) mkdir -p outputs/sanity_arithmetic/set && touch outputs/sanity_arithmetic/set/"$MADE" ;;
esac
"""
    )
    fake.chmod(0o755)

    def run(*overrides: str, made: str = "kept.parquet", **environment: str) -> list[list[str]]:
        done = subprocess.run(
            ["bash", tmp_path / SCRIPT, *overrides],
            env={"PATH": os.environ["PATH"], "PYTHON": str(fake), "MADE": made, **environment},
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        assert all(words[0] == "cpu" for words in lines)
        return [words[3:] if words[1:3] == ["-m", "verl_precision.cli"] else words[1:] for words in lines]

    return run


MAKE_TASK = ["recipes/sanity_arithmetic/make_task.py", "outputs/sanity_arithmetic/task"]
SANITY_SET = [
    *("sanity-set", "outputs/sanity_arithmetic/task/problems.jsonl", "--model", "outputs/sanity_arithmetic/task/model"),
    *("--output", "outputs/sanity_arithmetic/set", "--reward", "recipes/sanity_arithmetic/reward.py"),
    *("--max-prompt-length", "8", "--max-response-length", "8"),
]
COMPARE = ["compare", "recipes/sanity_arithmetic/sanity_arithmetic.yaml"]


def test_script_makes_task_and_set_and_compares(script):
    assert script("data.seed=7") == [
        MAKE_TASK,
        SANITY_SET,
        [*COMPARE, *"--precision bf16 --precision fp16 --pass-bar 0.95 estimator=pg_seq_is data.seed=7".split()],
    ]


def test_script_takes_what_is_there(script):
    script()
    (compare,) = script(PRECISIONS="fp32", ESTIMATOR="grpo")
    assert compare == [*COMPARE, *"--precision fp32 --pass-bar 0.95 estimator=grpo".split()]


def test_script_goes_on_with_a_filter_that_was_stopped(script):
    script(made="journal.jsonl")
    assert script()[0] == SANITY_SET
