"""Composed MoE, dense and LoRA configs against the paper (arXiv 2510.26788), value by value."""

import json
from pathlib import Path

import pytest
from composer import compose_recipe
from omegaconf import OmegaConf

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
ROWS = (line for line in Path(__file__).with_name("table_3.txt").read_text().splitlines() if line[0] != "#")
TABLE_3 = {row: (key, *values) for row, key, *values in (line.split(" | ") for line in ROWS)}


def recipe(name: str, *overrides: str, **kwargs):
    return compose_recipe(f"recipes/{name}/{name}.yaml", *overrides, **kwargs)


@pytest.mark.parametrize(("name", "column"), [("moe", 0), ("dense_14b", 1)])
def test_table_3(name, column, root):
    config, readme = recipe(name), (root / f"recipes/{name}/README.md").read_text()
    for row, (key, *wanted) in TABLE_3.items():
        assert f"| {row}" in readme, f"{row} is not in the README's table"
        if wanted[column] != "-":
            found = OmegaConf.select(config, key)
            found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
            assert found == json.loads(wanted[column]), row
    assert "| vllm_version" in readme


def test_evaluations_and_generation_in_flight():
    for name, responses in (("moe", 32), ("dense_14b", 8)):  # avg@32: A.1; avg@8: A.2
        kwargs = recipe(name).actor_rollout_ref.rollout.val_kwargs
        assert (kwargs.n, kwargs.do_sample) == (responses, True)
    config = recipe("dense_14b")  # verl 0.9's gen_batch_size, in train batches
    inflight = config.algorithm.filter_groups.max_inflight_gen_batches
    assert inflight * config.data.train_batch_size == 1536


# Section of the paper: recipe, estimator, model, and what the text says besides
SECTIONS = {
    "4.1": ("sanity", "pg_seq_is", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", {
        "data.train_batch_size": 64, f"{ROLLOUT}.n": 8, f"{ACTOR}.ppo_mini_batch_size": 64 / 4,
        f"{ROLLOUT}.max_model_len": 8000, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
    }),
    "4.4": ("precision_ablation", "grpo", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", {}),
    "5.1": ("moe", "grpo_seq_mis", "Qwen/Qwen3-30B-A3B-Base", {}),
    "5.2": ("lora", "grpo_token_tis", "Qwen/Qwen2.5-Math-1.5B", {
        f"{MODEL}.lora_rank": 32, f"{MODEL}.lora_alpha": 64, f"{MODEL}.target_modules": "all-linear",
        f"{ACTOR}.optim.lr": 4e-5,
    }),
    "5.3": ("dense_14b", "dapo", "Qwen/Qwen3-14B-Base", {}),
    "5.4": ("octothinker", "grpo", "OctoThinker/OctoThinker-3B-Hybrid-Base", {}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "estimator", "model", "settings"), SECTIONS.values(), ids=SECTIONS)
def test_what_a_section_says(name, estimator, model, settings):
    config = recipe(name, return_hydra_config=True)
    assert config.hydra.runtime.choices.estimator == estimator and config.actor_rollout_ref.model.path == model
    assert {key: OmegaConf.select(config, key) for key in settings} == settings


def test_the_context_follows_the_lengths():
    rollout = recipe("sanity", "data.max_response_length=16000").actor_rollout_ref.rollout
    assert rollout.max_model_len == rollout.prompt_length + rollout.response_length == 17024
