"""Which layers are verified on devices that need no special reload. What is kept of a load: test_accelerator.py."""

import pytest
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


def _rank_part(vocabulary: int, hidden: int, layers: int, ranks: int, *parameters: int) -> nn.Sequential:
    """A rank's part of a decoder on the meta device: embedding, the linear or expert layers of each block, head."""
    sizes = [vocabulary * hidden // ranks, *(size // ranks for _ in range(layers) for size in parameters)]
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in [*sizes, sizes[0]]])


@pytest.mark.parametrize(("name", "ranks", "model"), [
    ("Qwen 1.5B", 1, _rank_part(151936, 1536, 28, 1, 1536 * 2048, 1536 * 1536, 1536 * 17920, 1536 * 8960)),
    ("Qwen3-14B", 2, _rank_part(151936, 5120, 40, 2, 5120 * 7168, 5120 * 5120, 5120 * 34816, 5120 * 17408)),
    ("Qwen3-30B-A3B", 4, _rank_part(151936, 2048, 48, 4, 2048 * 5120, 2048 * 4096, 128 * 3 * 768 * 2048)),
])  # fmt: skip
def test_the_memory_in_docs_scales_is_what_the_choice_of_layers_takes(name, ranks, model, root):
    table = [line.split("|") for line in (root / "docs" / "scales.md").read_text().splitlines()]
    (row,) = ([cell.strip() for cell in line] for line in table if len(line) > 2 and line[1].strip() == name)
    assert int(row[2]) == ranks
    ends, largest, parameter, gib = (float(cell) for cell in row[3:7])
    sizes = [layer.weight.numel() for layer in model]
    assert (2 * sizes[0], max(sizes[1:-1])) == (pytest.approx(ends, rel=0.02), pytest.approx(largest, rel=0.02))
    taken = max(sum(sizes[int(i)] for i in choose_layers(model, sync, comparable)) for sync in range(60))
    bound = ends + 2**26 + (largest if largest > 2**26 else 0)
    assert 0.9 * bound < taken <= 1.01 * bound
    assert gib == pytest.approx((2 * bound + parameter) / 2**30, abs=0.05)
