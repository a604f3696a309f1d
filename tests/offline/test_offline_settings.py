"""What cannot work is refused by name, before a model loads."""

import re

import pytest
from made import settings_of

from verl_precision.errors import ConfigurationError
from verl_precision.offline.settings import check_model, described_model, load_tokenizer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_dtypes": ("fp61",)}, "--rollout-dtype fp61: there is no such dtype. Allowed: bf16, fp16, fp32"),
        ({"train_dtypes": ("bfloat16",)}, "--train-dtype bfloat16: there is no such dtype"),
        ({"train_dtypes": ("fp16", "fp16")}, "--train-dtype fp16 fp16: give at least one dtype, and each once"),
        ({"rollout_dtypes": ()}, "give at least one dtype"),
        ({"responses": 0}, "--responses 0: allowed is 1 or more"),
        ({"max_response_tokens": 0}, "--max-response-tokens 0"),
        ({"shard_responses": -1}, "--shard-responses -1"),
        ({"micro_batch_tokens": 0}, "--micro-batch-tokens 0"),
        ({"seed": -1}, "--seed -1"),
        ({"attention": "eager"}, "--attention eager: allowed is sdpa, flash_attention_2"),
        ({"attention": "flash_attention_2", "train_dtypes": ("fp32",)}, "flash-attn computes in 16 bits only"),
    ],
)
def test_settings_that_cannot_work(changes, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        settings_of(**changes)


def test_pairs_are_every_rollout_with_every_trainer():
    settings = settings_of(rollout_dtypes=("fp32",), train_dtypes=("bf16", "fp16"))
    assert settings.pairs == [("fp32", "bf16"), ("fp32", "fp16")]


@pytest.mark.parametrize("model", ["tiny:gpt9", "/nowhere/at/all", "nobody/no-such-model"])
def test_a_model_that_is_not_there(model):
    with pytest.raises(ConfigurationError, match="Allowed:"):
        described_model(model)


def test_a_model_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigurationError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_tiny_model_describes_itself():
    assert described_model("tiny:qwen3")["model_type"] == "qwen3"


def test_fp16_where_vllm_refuses_it():
    with pytest.raises(ConfigurationError, match="vLLM refuses FP16 for model type 'gemma3'"):
        check_model(settings_of(), {"model_type": "gemma3"}, 10)
    check_model(settings_of(rollout_dtypes=("bf16", "fp32")), {"model_type": "gemma3"}, 10)


def test_responses_must_fit_the_context():
    check_model(settings_of(max_response_tokens=90), {"model_type": "qwen3", "max_position_embeddings": 100}, 10)
    with pytest.raises(ConfigurationError, match=r"has 101 tokens, and the model's context 100.*up to 90"):
        check_model(settings_of(max_response_tokens=91), {"model_type": "qwen3", "max_position_embeddings": 100}, 10)
