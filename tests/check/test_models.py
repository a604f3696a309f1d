"""What is known of a model: a config.json, one that stands for it, a name; and every way in which a file is none."""

import json
import os
from pathlib import Path

import pytest
from composer import compose_verl

from verl_precision.base.errors import ConfigurationError
from verl_precision.check.models import by_name, described, known_models, read_config
from verl_precision.check.rules.dtypes import VLLM_REFUSES_FP16
from verl_precision.check.rules.gpu_memory import shape_of

# Billions of parameters of the model cards, by the beginning of the name; norms, biases and what sees images left out.
CARDS = {
    "Qwen/Qwen2.5-0.5B": 0.49, "Qwen/Qwen2.5-1.5B": 1.54, "Qwen/Qwen2.5-3B": 3.09, "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7, "Qwen/Qwen2.5-32B": 32.5, "Qwen/Qwen2.5-72B": 72.7, "Qwen/Qwen2-0.5B": 0.49,
    "Qwen/Qwen2-1.5B": 1.54, "Qwen/Qwen2-7B": 7.61, "Qwen/Qwen2-72B": 72.7, "Qwen/QwQ-32B": 32.5,
    "Qwen/Qwen2.5-Coder-0.5B": 0.49, "Qwen/Qwen2.5-Coder-1.5B": 1.54, "Qwen/Qwen2.5-Coder-3B": 3.09,
    "Qwen/Qwen2.5-Coder-7B": 7.61, "Qwen/Qwen2.5-Coder-14B": 14.7, "Qwen/Qwen2.5-Coder-32B": 32.5,
    "Qwen/Qwen2.5-Math-1.5B": 1.54, "Qwen/Qwen2.5-Math-7B": 7.61, "Qwen/Qwen2.5-VL-3B": 3.09,
    "Qwen/Qwen2.5-VL-7B": 7.61, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.61, "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14.7,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32.5, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03,
    "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-1.7B": 1.72, "Qwen/Qwen3-4B": 4.02, "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-235B-A22B": 235,
    "meta-llama/Llama-3.1-8B": 8.03, "meta-llama/Llama-3.3-70B": 70.6, "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21, "OctoThinker": 3.21, "deepseek-ai/deepseek-llm-7b": 6.9,
    "deepseek-ai/deepseek-coder-1.3b": 1.35, "deepseek-ai/deepseek-coder-6.7b": 6.74,
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM2-360M": 0.362, "google/gemma-2b": 2.51, "google/gemma-7b": 8.54, "google/gemma-2-2b": 2.61,
    "google/gemma-2-9b": 9.24, "google/gemma-2-27b": 27.2, "google/gemma-3-1b": 1.0, "google/gemma-3-4b": 3.88,
    "google/gemma-3-12b": 11.8, "google/gemma-3-27b": 27.0, "microsoft/phi-4": 14.7, "mistralai/Mistral-7B": 7.25,
    "zai-org/GLM-4-9B": 9.4, "openai/gpt-oss-20b": 20.9, "openai/gpt-oss-120b": 117,
}  # fmt: skip
# Name, known model that its shape is taken from (empty: none), whether that is its own name.
NAMES = [
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", True),
    ("qwen/QWEN3-8b", "Qwen/Qwen3-8B", True),
    ("/home/me/.cache/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "Qwen/Qwen3-8B", True),
    ("/data/models/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", False),
    ("$HDFS_ROOT/model/Qwen3-8B/", "Qwen/Qwen3-8B", False),
    ("hdfs://cluster/models/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-Base", False),
    ("unsloth/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", False),
    ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B", False),
    ("Qwen/Qwen2.5-14B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-14B", False),
    ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B-Instruct", False),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", False),
    ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b", False),
    ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3", False),
    ("google/gemma-2-9b", "google/gemma-2-9b-it", False),
    ("THUDM/glm-4-9b-chat", "", False),  # another architecture than GLM-4-9B-0414
    ("Qwen/Qwen3-VL-8B-Instruct", "", False),
    ("/ckpts/Qwen3-8B/global_step_50", "", False),
    ("my-lab/Qwen3-8B-pruned", "", False),
    ("", "", False),
    ("x" * 5000, "", False),
]


@pytest.mark.parametrize(("name", "known", "is_named"), NAMES, ids=lambda value: str(value)[:40])
def test_a_name_has_the_shape_of_the_model_that_it_names(name, known, is_named):
    found = by_name(name)
    assert (found.taken_from, found.is_named) == (known, is_named)
    if not known:
        assert not found.content
    elif is_named:
        assert found.content == known_models()[known]
    else:  # of a copy the context is its own
        assert shape_of(found.content) == shape_of(known_models()[known])
        assert "max_position_embeddings" not in found.content


@pytest.mark.parametrize("name", known_models())
def test_the_shape_has_the_number_of_parameters_of_the_models_card(name):
    shape, known = shape_of(known_models()[name]), known_models()[name]
    if "kv_lora_rank" in known or "num_hidden_layers" not in known:
        assert shape is None, "latent attention, or only what kind of model it is"
        return
    card = CARDS[max((each for each in CARDS if name.startswith(each)), key=len)]
    assert shape.parameters / 1e9 == pytest.approx(card, rel=0.03)


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
    with pytest.raises(ConfigurationError, match="this is no model's config.json") as refused:
        read_config(others.get(name, path), "--model-config")
    assert refused.value.setting == "--model-config" and refused.value.remedy and len(str(refused.value)) < 800


def test_a_broken_config_json_of_the_model_itself_is_refused_too(tmp_path):
    (tmp_path / "config.json").write_text("{")
    config = compose_verl("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={tmp_path}")
    with pytest.raises(ConfigurationError, match="actor_rollout_ref.model.path"):
        described(config)
    known = tmp_path / "other.json"
    known.write_text('{"model_type": "gemma2"}')
    assert described(config, given=known).content == {"model_type": "gemma2"}
