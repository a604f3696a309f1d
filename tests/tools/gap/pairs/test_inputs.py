"""Settings and prompts that cannot work are refused by name, before a model loads."""

import json
import re

import pytest
from pyarrow import Table, parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.model import Model
from verl_precision.tools.gap.pairs.settings import check_model
from verl_precision.tools.jobs.prompts import read_prompts

CHAT = [{"role": "user", "content": "2+2="}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_dtypes": ("fp61",)}, "--rollout-dtype fp61: this cannot work. Allowed: 'fp16', 'bf16' or 'fp32'"),
        ({"train_dtypes": ("fp16", "fp16")}, "--train-dtype fp16 fp16: this cannot work. Allowed: at least one dtype"),
        ({"rollout_dtypes": ()}, "at least one dtype"),
        ({"seed": -1}, "--seed -1"),
        ({"attention": "eager"}, "--attention eager: this cannot work. Allowed: 'sdpa' or 'flash_attention_2'"),
        ({"attention": "flash_attention_2", "train_dtypes": ("fp32",)}, "flash-attn computes in 16 bits only"),
    ],
)
def test_settings_that_cannot_work(job_of, changes, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        job_of(**changes)


def test_responses_must_fit_the_context_and_vllm_takes_the_dtype(job_of):
    small = Model("m", "", {"model_type": "qwen3", "max_position_embeddings": 100})
    check_model(job_of(max_response_tokens=90), small, 10)
    with pytest.raises(ConfigurationError, match=r"has 101 tokens, and the model's context 100.*up to 90"):
        check_model(job_of(max_response_tokens=91), small, 10)
    with pytest.raises(ConfigurationError, match="--rollout-dtype fp16 with model m: vLLM refuses FP16"):
        check_model(job_of(), Model("m", "", {"model_type": "gemma3"}), 10)


def test_verls_parquet_and_jsonl_read_the_same(tmp_path):
    rows = [{"prompt": CHAT, "ability": "math"}, {"prompt": [*CHAT, *CHAT], "ability": "math"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    for name in ("p.parquet", "p.jsonl"):
        assert read_prompts(tmp_path / name, "prompt", None) == [CHAT, [*CHAT, *CHAT]]
    assert read_prompts(tmp_path / "p.jsonl", "ability", 1) == ["math"]


def test_prompts_that_come_with_the_package_and_with_the_quickstart(root):
    built_in = read_prompts(None, "prompt", None)
    assert len(built_in) == 16 and built_in[0][0]["content"].startswith("What is 17 times 23?")
    prompts = read_prompts(root / "recipes" / "quickstart" / "prompts.jsonl", "prompt", 3)
    assert prompts[0] == [{"role": "user", "content": "sum one"}] and len(prompts) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"question": "b"}', "row 1 has no field 'prompt' (it has: question)"),
        ('{"prompt": ""}', "field 'prompt' of row 0 is ''"),
        ('{"prompt": []}', "field 'prompt' of row 0 is '[]'"),
        ('{"prompt": [{"role": "user"}]}', "Allowed: text that is not empty, or a list"),
        ('{"prompt": 3}', "is '3'"),
        ('["a"]', "row 0 has no field 'prompt' (it has: list)"),
        ("\n", "the file has no rows"),
    ],
)
def test_a_file_that_is_not_prompts(tmp_path, content, words):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read_prompts(tmp_path / "p.jsonl", "prompt", None)
