"""Which layers are verified, and what is kept of a load on devices that need no special reload."""

import pytest
import torch
from torch import nn

from verl_precision.integration.load_recorder import choose_layers, comparable, record_loads
from verl_precision.weight_sync.verify import find_damage


def _linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])


def _tied() -> nn.Sequential:
    """Two layers, one parameter. A recorder around a recorder lost the tensors and stayed behind."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def _own_loader(param, loaded_weight) -> None:
    param.data.copy_(loaded_weight)


def test_a_small_model_is_verified_whole_but_for_unknown_packing():
    model = _linears()
    assert len(choose_layers(model, 0, comparable)) == 10
    model[3].quant_method = object()
    assert "3" not in choose_layers(model, 0, comparable)
    assert choose_layers(nn.Sequential(), 0, comparable) == set()


def test_of_a_large_model_the_first_and_last_layer_always_and_others_in_turn():
    seen: set[str] = set()
    for sync in range(12):
        chosen = choose_layers(_linears(), sync, comparable, budget=3 * 64)
        assert {"0", "9"} <= chosen and len(chosen) == 3
        seen |= chosen
    assert len(seen) == 10


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # stored; FP32 is sent and the loader casts
@pytest.mark.parametrize("build", [_linears, _tied])
def test_a_recorded_load_verifies_a_layer_and_a_lost_write_shows(build, dtype, own_loader):
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    model = build().to(dtype)
    if own_loader:
        model[0].weight.weight_loader = _own_loader
    with record_loads(model, {"0", "1"}) as records:
        for parameter in model.parameters():
            bucket = torch.randn(8, 8)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, bucket)
            bucket.zero_()  # the bucket's memory is reused
    assert getattr(model[0].weight, "weight_loader", None) is (_own_loader if own_loader else None), "put back"

    def damage(layer: int) -> str | None:
        return find_damage(model[layer], records[str(layer)], repack=False, model_dtype=dtype)

    assert set(records) == {"0", "1"} and [len(record.calls) for record in records.values()] == [1, 1]
    assert damage(0) is None and damage(1) is None
    with torch.no_grad():
        model[1].weight[0, 0] += 1
    assert damage(1) == "weight: 1 of 64 elements are not those that were sent"
    assert damage(0) == (damage(1) if build is _tied else None)
