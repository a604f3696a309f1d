"""Tiny models: deterministic, complete, and never half there."""

import filecmp
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools import tiny_model
from verl_precision.tools.tiny_model import ARCHITECTURES, VOCABULARY, build_tiny_model, cached_tiny_model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def built(request, tmp_path_factory):
    """An architecture, and a folder with a model of it."""
    folder = tmp_path_factory.mktemp(request.param) / "m"
    build_tiny_model(request.param, folder)
    return request.param, folder


def test_loads_and_vocabulary_is_the_tokenizers(built):
    architecture, folder = built
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == len(VOCABULARY) + 2 * (architecture == "glm4_moe")
    assert model.config.tie_word_embeddings == tiny_model.settings(architecture)[1]["tie_word_embeddings"]
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_tokenizer_round_trip_one_token_a_character(built):
    tokenizer = AutoTokenizer.from_pretrained(built[1])
    text = "".join(chr(code) for code in range(32, 127)) + "\n  two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids == [VOCABULARY.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt)["input_ids"], skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_same_bytes_every_time_and_global_random_state_untouched(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_tiny_model("qwen3", tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    build_tiny_model("qwen3", tmp_path / "b")
    assert filecmp.cmp(tmp_path / "a/model.safetensors", tmp_path / "b/model.safetensors", shallow=False)


def test_cache_builds_once_and_leaves_nothing_half_done(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PRECISION_CACHE", str(tmp_path))
    folder = cached_tiny_model("qwen3")
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert cached_tiny_model("qwen3") == folder and (folder / "config.json").stat().st_mtime_ns == stamp
    monkeypatch.setattr(tiny_model, "save", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cached_tiny_model("qwen3_tied")
    assert [path.name for path in (tmp_path / "tiny_models").iterdir()] == [folder.name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_are_what_vllm_takes_them_for(architecture):
    """vLLM derives Qwen2's head size from the hidden size, and has no kernel on a CPU for sizes below 32."""
    _, values = tiny_model.settings(architecture)
    if architecture == "qwen2":
        assert values["head_dim"] == values["hidden_size"] // values["num_attention_heads"]
    assert values["head_dim"] == 32 and values["num_attention_heads"] % values["num_key_value_heads"] == 0


def test_unknown_architecture_and_existing_folder_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="tiny_architecture='gpt9'.*qwen3, qwen3_tied"):
        cached_tiny_model("gpt9")
    with pytest.raises(ConfigurationError, match="exists; nothing was written"):
        build_tiny_model("qwen3", tmp_path)
    assert list(tmp_path.iterdir()) == []
