"""What could not be looked at is said, once for each thing that is missing, and never as an error."""

import functools
import json
import re
from pathlib import Path

import pytest

from verl_precision.check import probe
from verl_precision.check.preflight import find_problems
from verl_precision.tools.checking import recipe_config
from verl_precision.tools.checking.composing import compose_recipe
from verl_precision.tools.checking.recipe_config import check_recipe

QUICKSTART = "recipes/quickstart/quickstart.yaml"
GPUS = "algorithm.adv_estimator=grpo rollout.name=vllm rollout.n=8 actor.use_dynamic_bsz=True "
GPUS += "+precision=fp16 trainer.save_freq=-1"
GEMMA = "model.path=google/gemma-2-9b-it actor.ppo_max_token_len_per_gpu=400000 data.max_response_length=4096"
H100 = {"gpu": "H100"}
MODEL = "actor_rollout_ref.model.path"


@pytest.fixture(autouse=True)
def without_gpus(at_root, monkeypatch):
    monkeypatch.setattr(recipe_config, "gpus_here", lambda: ())


@functools.cache
def verls_own() -> Path:
    from verl.trainer import config

    return Path(config.__file__).parent / "ppo_trainer.yaml"


def report(words: str, recipe: str | None = None, **meant):
    text = re.sub(r"(?<!\S)(\+*)(actor|rollout|ref|model)\.", r"\1actor_rollout_ref.\2.", words)
    return check_recipe(Path(recipe) if recipe else verls_own(), text.split(), **meant)


def unchecked(found) -> dict[str, str]:
    return {each.name: each.problem for each in found.faults if each.severity == "unchecked"}


def errors(found) -> set[str]:
    return {each.name for each in found.faults if each.severity == "error"}


def test_a_model_that_nobody_knows_is_one_finding_with_what_was_not_looked_at(tmp_path):
    found = report(f"{GPUS} model.path=some-lab/Own-7B", **H100)
    assert not errors(found)
    (fault,) = [each for each in found.faults if each.setting == MODEL]
    assert fault.name == "model-unknown" and fault.severity == "unchecked" and fault.value == "some-lab/Own-7B"
    subjects = ("the memory of a GPU", "attention heads", "whether vLLM takes it in FP16", "the length of its context")
    assert all(subject in fault.problem for subject in subjects)
    assert "--model-config FILE" in fault.remedy and "hf download some-lab/Own-7B" in fault.remedy
    sizes = {"num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000, "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for path in (tmp_path, tmp_path / "config.json"):
        words = GEMMA.replace("google/gemma-2-9b-it", "some-lab/Own-7B rollout.tensor_model_parallel_size=1")
        found = report(f"{GPUS} {words}", gpu="H100", model_config=path)
        assert errors(found) == {"vllm-refuses-fp16", "memory-training"}
        assert "model-unknown" not in unchecked(found)


@pytest.mark.parametrize("path", ["google/gemma-2-9b-it", "/data/models/gemma-2-9b-it"])
def test_a_model_that_is_known_by_its_name_is_looked_at_and_a_guess_is_said(path):
    found = report(f"{GPUS} {GEMMA.replace('google/gemma-2-9b-it', path)}", **H100)
    assert errors(found) == {"vllm-refuses-fp16", "memory-training"} and "model-unknown" not in unchecked(found)
    guess = "because of its name, its shape is assumed to be that of google/gemma-2-9b-it"
    assert (guess in unchecked(found).get("model-by-name", "")) == path.startswith("/")


@pytest.mark.parametrize("meant", [{}, H100])
def test_a_path_that_is_not_here_is_no_error_of_a_run_that_is_elsewhere(meant):
    why = "--gpu H100" if meant else "trainer.device=cuda, and no such device is here"
    words = f"{GPUS} model.path=/data/models/own data.val_files=/data/val.parquet"
    found = report(f"{words} reward.custom_reward_function.path=/data/reward.py", **meant)
    assert not errors(found) and "model-missing" not in {each.name for each in found.faults}
    said = unchecked(found)
    assert "model-unknown" in said
    assert f"({why})" in said["files-missing"] and "did not look at it" in said["files-missing"]
    assert ("gpu-unknown" in said) is not bool(meant)


def test_it_stays_an_error_of_a_run_that_is_here():
    found = report("model.path=/data/models/own", recipe=QUICKSTART)  # on a CPU
    assert errors(found) == {"model-missing"} and "model-unknown" not in unchecked(found), "one cause, one finding"


def test_a_gpu_that_is_here_makes_a_run_one_that_is_here(monkeypatch):
    monkeypatch.setattr(recipe_config, "gpus_here", lambda: ("NVIDIA H100 80GB HBM3",))
    found = report(f"{GPUS} model.path=/data/models/own")
    assert errors(found) == {"model-missing"} and "gpu-unknown" not in unchecked(found)
    assert errors(report(f"{GPUS} model.path=/data/models/own +scale=1x8_h100")) == {"model-missing"}
    monkeypatch.setattr(recipe_config, "gpus_here", lambda: ("NVIDIA L4",))
    found = report(f"{GPUS} model.path=/data/models/own +scale=1x8_h100")
    assert not errors(found) and "scale=1x8_h100, and here is NVIDIA L4" in str(unchecked(found))


@pytest.mark.parametrize(("words", "meant", "name", "subject"), [
    ("model.path=Qwen/Qwen3-8B", {}, "gpu-unknown", "the memory of a GPU"),
    ("model.path=Qwen/Qwen3-8B critic.enable=True", H100, "memory-unknown", "the memory of a GPU"),
    ("model.path=Qwen/Qwen3-8B model_engine=megatron", H100, "memory-unknown", "the memory of a GPU"),
    ("model.path=deepseek-ai/DeepSeek-V3", H100, "shape-unknown", "the memory of a GPU"),
    ("model.path=Qwen/Qwen3-8B model.lora_rank=8", H100, "vllm-unknown", "whether it loads adapters"),
    ("model.lora_adapter_path=/no/adapter model.lora_rank=8", H100, "adapter-unknown", "its modules, its dropout"),
])  # fmt: skip
def test_each_look_that_finds_nothing_is_said(words, meant, name, subject, monkeypatch):
    if name == "vllm-unknown":
        monkeypatch.setattr(probe, "installed_vllm", lambda: None)
    assert subject in unchecked(report(f"{GPUS} {words}", **meant))[name]
    assert name != "gpu-unknown" or name not in unchecked(report(f"{GPUS} {words} +scale=1x8_h100"))


def test_a_check_of_a_run_here_has_nothing_that_was_not_looked_at():
    found = report("", recipe=QUICKSTART)
    assert found.ok and found.counts == {"error": 0, "warning": 0, "unchecked": 0}


def test_a_real_start_refuses_what_is_not_here_and_says_nothing_of_what_was_not_looked_at(capsys):
    text = re.sub(r"(?<!\S)(actor|rollout|model)\.", r"actor_rollout_ref.\1.", f"{GPUS} model.path=/data/models/own")
    problems = find_problems(compose_recipe(verls_own(), text.split()))
    assert any("model-missing" in problem for problem in problems)
    assert any("files-missing" in problem for problem in problems)
    assert "Not looked at" not in f"{problems}{capsys.readouterr()}"
