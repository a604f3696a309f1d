"""What cannot work is refused by name, before a model loads."""

import re

import pytest
from made import job_of

from verl_precision.errors import ConfigurationError
from verl_precision.offline_mismatch.settings import check_model
from verl_precision.sampling.model import Model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_dtypes": ("fp61",)}, "--rollout-dtype fp61: this cannot work. Allowed: 'bf16', 'fp16' or 'fp32'"),
        ({"train_dtypes": ("bfloat16",)}, "--train-dtype bfloat16: this cannot work"),
        (
            {"train_dtypes": ("fp16", "fp16")},
            "--train-dtype fp16 fp16: this cannot work. Allowed: at least one dtype",
        ),
        ({"rollout_dtypes": ()}, "at least one dtype"),
        ({"responses": 0}, "--responses 0: this cannot work. Allowed: greater than or equal to 1"),
        ({"max_response_tokens": 0}, "--max-response-tokens 0"),
        ({"micro_batch_tokens": 0}, "--micro-batch-tokens 0"),
        ({"seed": -1}, "--seed -1"),
        ({"attention": "eager"}, "--attention eager: this cannot work. Allowed: 'sdpa' or 'flash_attention_2'"),
        ({"attention": "flash_attention_2", "train_dtypes": ("fp32",)}, "flash-attn computes in 16 bits only"),
    ],
)
def test_settings_that_cannot_work(changes, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        job_of(**changes)


def test_pairs_are_every_rollout_with_every_trainer():
    settings = job_of(rollout_dtypes=("fp32",), train_dtypes=("bf16", "fp16"))
    assert settings.pairs == [("fp32", "bf16"), ("fp32", "fp16")]


SMALL = Model("m", "", {"model_type": "qwen3", "max_position_embeddings": 100})


def test_responses_must_fit_the_context():
    check_model(job_of(max_response_tokens=90), SMALL, 10)
    with pytest.raises(ConfigurationError, match=r"has 101 tokens, and the model's context 100.*up to 90"):
        check_model(job_of(max_response_tokens=91), SMALL, 10)


def test_fp16_where_vllm_refuses_it():
    with pytest.raises(ConfigurationError, match="--rollout-dtype fp16 with --model m: vLLM refuses FP16"):
        check_model(job_of(), Model("m", "", {"model_type": "gemma3"}), 10)
