"""From one variant to the next one thing changes, and what a job does not have is left out."""

from dataclasses import fields

import pytest

from verl_precision.tools.gap.explain.judge import CAUSES
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import reference, replayed, variants

WHOLE = {
    "rollout_model": "tiny:llama", "rollout_dtype": "fp16", "train_dtype": "bf16", "top_p": 0.8, "packed": True,
    "attention": "flash_attention_2", "fp32_log_probs": False, "fp32_output_head": True, "prefix_caching": True,
    "cuda_graphs": True,
}  # fmt: skip
RAW = {"raw_log_probs": True, "temperature": 0.8, "top_p": 0.8}
LORA = {"adapter": "folder", "rollout_dtype": "bf16", "train_dtype": "fp16"}
ELSEWHERE = {"staleness", "routing", "temperature", "merged_lora"}  # causes that the whole path has not


def job(**changes):
    return Explanation(model="tiny:qwen3", prompts="built-in", **changes)


def test_whole_path():
    chain = variants(job(**WHOLE))
    assert [one.cause for one in chain[1:]] == [cause for cause in CAUSES if cause not in ELSEWHERE]
    assert len({one.name for one in chain}) == len(chain)
    assert chain[0].draws and chain[-1].attention == "flash_attention_2" and chain[-1].packed


def test_plain_pairs():
    causes = {dtype: [one.cause for one in variants(job(rollout_dtype=dtype, train_dtype=dtype))[1:]]
              for dtype in ("fp32", "bf16")}  # fmt: skip
    assert causes["fp32"] == ["decode", "batch", "engine", "layout"]
    assert causes["bf16"] == ["decode", "batch", "rollout_precision", "engine", "trainer_precision", "layout"]


def test_raw_log_probs_know_neither_temperature_nor_truncation():
    chain = variants(job(**RAW))
    assert [one.cause for one in chain[1:]][:2] == ["temperature", "decode"]
    assert [(one.tempered, one.processed) for one in chain[:3]] == [(False, False), (True, False), (True, True)]
    assert "temperature" not in {one.cause for one in variants(job(raw_log_probs=True))}, (
        "at 1 there is nothing to divide"
    )


def test_choices_of_experts_are_recorded_everywhere():
    assert {one.routing for one in variants(job(), routed=True)} == {"recorded"}
    one = replayed(variants(job(), routed=True))
    assert (one.routing, one.dtype, one.engine) == ("replayed", "fp32", "trainer")
    assert not any(one.routing for one in variants(job()))


def test_an_adapter_is_merged_on_the_rollouts_side_alone():
    chain = variants(job(**LORA))
    assert [one.adapter for one in chain] == [False] * 5 + [True] * 3
    assert [one.cause for one in chain[4:]] == ["engine", "merged_lora", "trainer_precision", "layout"]


@pytest.mark.parametrize(
    "changes", [{}, WHOLE, RAW, LORA, {"train_dtype": "fp32"}, {"rollout_dtype": "fp32", "top_k": 5}]
)
def test_neighbours_differ_in_what_the_cause_says(changes):
    chain = variants(job(**changes))
    may_change = {
        "temperature": {"tempered"},
        "sampling": {"processed"},
        "cache": {"cached"},
        "decode": {"draws", "processed"},
        "batch": {"alone"},
        "cuda_graphs": {"compiled"},
        "rollout_precision": {"dtype", "rounded_to"},  # the weights are those that the dtype held
        "engine": {"engine", "rounded_to"},
        "weights": {"model"},
        "merged_lora": {"adapter", "rounded_to"},
        "weight_rounding": {"rounded_to"},
        "trainer_precision": {"dtype", "rounded_to", "model"},
        "attention": {"attention"},
        "output_head": {"fp32_output_head"},
        "log_probs": {"fp32_log_probs"},
        "layout": {"alone", "packed"},
    }
    for before, after in zip(chain, chain[1:], strict=False):
        changed = {f.name for f in fields(after) if getattr(before, f.name) != getattr(after, f.name)}
        assert changed - {"name", "cause", "words"} <= may_change[after.cause], after.name


@pytest.mark.parametrize("train", ["bf16", "fp16", "fp32"])
def test_reference_has_bf16_and_nothing_else(train):
    chain = variants(job(train_dtype=train, rollout_dtype="fp16"))
    before, after = reference(job(train_dtype=train, rollout_dtype="fp16"), chain)
    assert (before.dtype, after.dtype, before.engine, after.engine) == ("fp32", "bf16", "trainer", "trainer")
    assert (after in chain) == (train == "bf16")
