"""What is known of a model: a config.json, one that stands for it, a name; all that is none; memory by hand."""

import json
import os
import re
from dataclasses import astuple
from pathlib import Path

import pytest
from composer import compose_verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.check.models import by_name, described, known_models, read_config, served_models
from verl_precision.check.rules import gpu_memory as memory
from verl_precision.check.rules.dtypes import VLLM_REFUSES_FP16
from verl_precision.check.rules.gpu_memory import GIB, ModelShape, shape_of

# Name, known model that its shape is guessed from; itself: it is that model's own name; empty: none.
NAMES = [
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ("qwen/QWEN3-8b", "qwen/QWEN3-8b"),
    ("/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "/hub/models--Qwen--Qwen3-8B/snapshots/0a1b"),
    ("/data/models/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B"),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
    ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3"),
    ("google/gemma-2-9b", "google/gemma-2-9b-it"),
    ("THUDM/glm-4-9b-chat", ""),  # another architecture than GLM-4-9B-0414
    ("/ckpts/Qwen3-8B/global_step_50", ""),
    ("my-lab/Qwen3-8B-pruned", ""),
    ("x" * 5000, ""),
]


@pytest.mark.parametrize(("name", "known"), NAMES, ids=lambda value: str(value)[:40])
def test_a_name_has_the_shape_of_the_model_that_it_names(name, known):
    found = by_name(name)
    if known == name:
        assert found.content == known_models()["Qwen/Qwen3-8B"] and not found.taken_from
    elif known:  # of a copy the context is its own
        assert found.taken_from == known and shape_of(found.content) == shape_of(known_models()[known])
        assert "max_position_embeddings" not in found.content
    else:
        assert not found.content


@pytest.mark.parametrize("name", known_models())
def test_the_shape_has_about_the_parameters_that_the_models_name_says(name):
    """Names round, and leave out embeddings: gemma-7b has 8.5."""
    shape, known = shape_of(known_models()[name]), known_models()[name]
    if "kv_lora_rank" in known or "num_hidden_layers" not in known:
        assert shape is None, "latent attention, or only what kind of model it is"
    elif said := re.search(r"(?<![\d.A])(\d+(?:\.\d+)?)([BM])\b", name, re.I):
        size = float(said[1]) * (1e9 if said[2] in "Bb" else 1e6)
        assert shape.parameters == pytest.approx(size, rel=0.32)


def test_the_commonest_models_are_known_and_those_that_vllm_refuses_in_fp16_among_them():
    assert len(known_models()) >= 80
    kinds = {described["model_type"] for described in known_models().values()}
    assert set(VLLM_REFUSES_FP16) - kinds == {"plamo2"}  # no public script of verl names one


def test_what_describes_the_text_of_a_model_that_sees_images_counts(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4}
    text = {"model_type": "gemma3_text", "intermediate_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    for path in (tmp_path, tmp_path / "config.json"):
        content = read_config(path, "--model-config")
        assert content["model_type"] == "gemma3" and shape_of(content).layers == 2


BAD = {
    "no JSON": "{", "a list": "[1]", "deep": "[" * 100_000, "no heads": '{"num_attention_heads": 0}',
    "half a layer": '{"num_hidden_layers": 1.5}', "a switch": '{"hidden_size": true}', "text": '{"text_config": 3}',
    "kind": '{"model_type": 5}', "large number": '{"hidden_size": %s}' % ("9" * 5000), "huge": " " * (17 << 20),
    "binary": b"\xff\xfe\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD, "nothing", "folder", "fifo", "device", "long name", "null byte"])
def test_what_is_no_config_json_is_refused_in_words(name, tmp_path):
    path = tmp_path / "config.json"
    if name in BAD:
        path.write_bytes(content if isinstance(content := BAD[name], bytes) else content.encode())
    if name == "fifo":
        os.mkfifo(path)
    others = {"folder": tmp_path, "device": Path("/dev/zero"), "long name": Path("x" * 5000), "null byte": Path("a\0b")}
    with pytest.raises(ConfigurationError, match="this is not a model's config.json") as refused:
        read_config(others.get(name, path), "--model-config")
    assert refused.value.setting == "--model-config" and refused.value.remedy and len(str(refused.value)) < 800


def test_a_broken_config_json_of_the_model_itself_is_refused_too(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="actor_rollout_ref.model.path"):
        described(str(tmp_path), "actor_rollout_ref.model.path")


ROLLOUT = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=float16")
TAUGHT = ("distillation.enabled=True", "distillation.n_gpus_per_node=2", "distillation.nnodes=1")
ONE = "distillation.teacher_models.teacher_model"


def named(name: str) -> tuple[str, ...]:
    given = ("model_path=owner/teacher", f"key={name}", "num_replicas=1", "inference.name=vllm")
    return tuple(f"+distillation.teacher_models.{name}.{each}" for each in given)


@pytest.mark.parametrize(("words", "dtypes"), [
    ((), {}),
    ((f"{ONE}.model_path=owner/teacher",), {"teacher": "fp16"}),  # verl's YAML refers to the rollout's
    ((f"{ONE}.model_path=owner/teacher", f"{ONE}.inference.dtype=bfloat16"), {"teacher": "bf16"}),
    (named("maths"), {"teacher": "bf16"}),  # verl's typed config does not, and its own entry is dropped
    ((*named("maths"), "+distillation.teacher_models.maths.inference.dtype=half"), {"teacher": "fp16"}),
])  # fmt: skip
def test_a_teachers_dtype_is_what_verl_builds(words, dtypes):
    config = compose_verl(*ROLLOUT, *(TAUGHT if words else ()), *words)
    assert {served.role: served.dtype for served in served_models(config)} == dtypes
    if words:
        (built,) = omega_conf_to_dataclass(config.distillation).teacher_models.values()
        assert [short(built.inference.dtype)] == list(dtypes.values())


def test_two_teachers_and_a_reward_model():
    judge = ("reward.reward_model.enable=True", "reward.reward_model.model_path=owner/judge")
    config = compose_verl(*ROLLOUT, *TAUGHT, *named("maths"), *named("code"), *judge)
    assert [served.role for served in served_models(config)] == ["teacher maths", "teacher code", "reward model"]
    for served in served_models(config):
        assert OmegaConf.select(config, served.named) == served.path
        assert served.dtype == "bf16" and served.setting in served.source, astuple(served)


# 2 layers; attention 2*8*4*(2+1) = 192, MLP 3*8*16 = 384, ends 2*10*8 = 160
SMALL = ModelShape(2, 8, 10, 2, 1, 4, 16)
EXPERTS = ModelShape(2, 8, 10, 2, 1, 4, 16, experts=4, experts_per_token=2)


def test_parameters_by_hand():
    assert SMALL.layer_parameters == 192 + 384
    assert SMALL.parameters == 2 * 576 + 160
    assert ModelShape(2, 8, 10, 2, 1, 4, 16, tied=True).parameters == 2 * 576 + 80
    assert EXPERTS.layer_parameters == 192 + 8 * 4 + 4 * 384


def test_bytes_by_hand():
    assert memory.state_bytes(SMALL, 4) == 16 * 1312 // 4
    assert memory.gathered_bytes(SMALL) == 8 * 160 + 10 * 576
    # inputs 2*2*8*5, layer 34*8*5, logits 4*10*5, chunk 5*4*512*10
    assert memory.activation_bytes(SMALL, 5) == 160 + 1360 + 200 + 102400
    assert memory.activation_bytes(EXPERTS, 5) - memory.activation_bytes(SMALL, 5) == 2 * 2 * (2 * 8 + 3 * 16) * 5
    assert memory.state_bytes(SMALL, 2) == 16 * 1312 // 2


def test_memory_of_a_gpu_by_its_name():
    sizes = {"H200": 141, "NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-40GB": 40, "A100": 80, "L40S": 48}
    sizes |= {"NVIDIA B200": 180, "NVIDIA GB200": 186}
    found = {name: memory.gpu_memory(name) for name in (*sizes, "?")}
    assert found == {name: gb * GIB for name, gb in sizes.items()} | {"?": None}
