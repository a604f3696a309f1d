"""Which layers are verified on devices that need no special reload. What is kept of a load: test_accelerator.py."""

import torch
from torch import nn

from verl_precision.integration.rollout.load_recorder import choose_layers, comparable


def _linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])


def test_a_small_model_is_verified_whole_but_for_unknown_packing():
    model = _linears()
    assert len(choose_layers(model, 0, comparable)) == 10
    model[3].quant_method = object()
    assert "3" not in choose_layers(model, 0, comparable)
    assert choose_layers(nn.Sequential(), 0, comparable) == set()


def test_of_a_large_model_the_first_and_last_layer_always_and_others_in_turn():
    chosen = [choose_layers(_linears(), sync, comparable, budget=64) for sync in range(12)]
    for layers in chosen:
        assert {"0", "9"} <= layers and len(layers) == 3
    assert len(set().union(*chosen)) == 10


def test_no_layer_is_too_large_for_its_turn_and_at_most_one_is_beside_the_window():
    """Embedding and head of a large model alone are larger than the budget, and so is a layer of experts."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8 if i % 3 else 80, bias=False) for i in range(12)])
    chosen = [choose_layers(model, sync, comparable, budget=2 * 64) for sync in range(30)]
    for layers in chosen:
        assert sorted(model[int(name)].weight.numel() for name in layers - {"0", "11"}) == [64, 64, 640]
    assert len(set().union(*chosen)) == 12
