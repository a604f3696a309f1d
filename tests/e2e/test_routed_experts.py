"""Routers with experts nearly tied, in BF16, in the real stack: the two engines choose differently, until replay."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_precision.tools.tiny_model import cached_tiny_model

RECIPE = Path("recipes/moe/moe.yaml")


@pytest.fixture(scope="module")
def nearly_tied(tmp_path_factory) -> Path:
    """The tiny mixture, with routers that hardly prefer an expert, and experts that differ much."""
    folder = tmp_path_factory.mktemp("nearly_tied")
    source = cached_tiny_model("qwen3_moe")
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            common = torch.randn(1, weight.shape[1], generator=generator)
            weights[name] = common + 0.01 * torch.randn(weight.shape, generator=generator)
        elif ".experts." in name:
            weights[name] = 6 * weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def trained(run_recipe, nearly_tied):
    """Run two steps with a kind of replay; return their metrics."""
    model = f"actor_rollout_ref.model.path={nearly_tied}"
    steps = ("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1")
    return lambda replay: run_recipe(RECIPE, "scale=cpu", "precision=bf16", f"+router_replay={replay}", model, *steps)


def test_replay_makes_the_trainer_compute_with_the_rollouts_experts(trained):
    """Its own choice would have been another in more than 5% of them."""
    for replayed in trained("rollout"):
        assert replayed["mismatch/routing_agreement"] == 1
        assert replayed["mismatch/routing_changed_fraction"] > 0.05


@pytest.mark.matrix
def test_replay_halves_the_gap(trained):
    """That replay changes choices: the test above."""
    for without, replayed in zip(trained("measure"), trained("rollout"), strict=True):
        assert without["mismatch/routing_agreement"] < 0.9
        assert without["mismatch/routing_changed_fraction"] == 0
        assert sum(name.startswith("mismatch/routing_agreement/layer_") for name in without) == 4, "of each layer"
        assert replayed["mismatch/k3_kl"] < 0.5 * without["mismatch/k3_kl"]


@pytest.mark.matrix
def test_the_update_replays_the_old_log_prob_pass(trained):
    """The choices that are replayed: tests/engine/test_router_replay.py.

    The two passes pack other micro-batches, and choose differently for that alone; the weights have hardly moved."""
    for without, replayed in zip(trained("measure"), trained("old"), strict=True):
        assert replayed["mismatch/routing_agreement"] == 1, "here: with the pass that is replayed"
        assert replayed["mismatch/routing_changed_fraction"] > 0.05
        spread, otherwise = (row["actor/ratio_max"] - row["actor/ratio_min"] for row in (replayed, without))
        assert spread < 0.3 * otherwise
