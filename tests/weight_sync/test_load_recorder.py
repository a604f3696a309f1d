"""Which layers are verified, and what is kept of a load on devices that need no special reload."""

import torch
from torch import nn

from verl_precision.integration.load_recorder import choose_layers, comparable, record_loads
from verl_precision.weight_sync.verify import examine


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])


def _load(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    """Load the way vLLM's models do."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


def _examine(layer, record, dtype=torch.float32):
    return examine(layer, record, repack=False, model_dtype=dtype)


def test_small_model_is_verified_whole():
    assert len(choose_layers(_model(), 0, comparable)) == 10


def test_large_model_first_and_last_always_others_in_turn():
    seen: set[str] = set()
    for sync in range(12):
        chosen = choose_layers(_model(), sync, comparable, budget=3 * 64)
        assert {"0", "9"} <= chosen and len(chosen) == 3
        seen |= chosen
    assert len(seen) == 10


def test_unknown_post_processing_is_left_out():
    model = _model()
    model[3].quant_method = object()
    assert "3" not in choose_layers(model, 0, comparable)
    assert choose_layers(nn.Sequential(), 0, comparable) == set()


def test_record_and_rebuild_agree_then_a_lost_write_shows():
    model = _model()
    weights = {name: torch.randn(8, 8) for name, _ in model.named_parameters()}
    with record_loads(model, {"0", "9"}) as records:
        for name, parameter in model.named_parameters():
            bucket = weights[name].clone()
            _load(parameter, bucket)
            bucket.zero_()  # the bucket's memory is reused
    assert set(records) == {"0", "9"}
    for name, record in records.items():
        assert _examine(model[int(name)], record).verified
    with torch.no_grad():
        model[9].weight[0, 0] += 1
    found = _examine(model[9], records["9"]).damage
    assert found == "weight: 1 of 64 elements are not those that were sent"


def test_loaders_are_put_back():
    model = _model()
    custom = lambda param, loaded_weight: param.data.copy_(loaded_weight)  # noqa: E731
    model[0].weight.weight_loader = custom
    with record_loads(model, {"0", "1"}):
        assert model[0].weight.weight_loader is not custom
    assert model[0].weight.weight_loader is custom
    assert not hasattr(model[1].weight, "weight_loader")


def test_stored_dtype_is_the_models_not_the_senders():
    """FP32 weights sent to a BF16 rollout are compared after the loader's cast."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False).bfloat16())
    with record_loads(model, {"0"}) as records:
        _load(model[0].weight, torch.randn(8, 8))
    assert _examine(model[0], records["0"], torch.bfloat16).verified


def test_a_shared_parameter_is_recorded_once_for_both_layers():
    """Tied embeddings: two layers, one parameter. A recorder around a recorder lost the tensors and stayed behind."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    loader = lambda param, loaded_weight: param.data.copy_(loaded_weight)  # noqa: E731
    model[0].weight.weight_loader = loader
    bucket = torch.randn(8, 4)
    with record_loads(model, {"0", "1"}) as records:
        _load(model[0].weight, bucket)
        bucket.zero_()  # the bucket's memory is reused
    assert model[0].weight.weight_loader is loader
    for name, record in records.items():
        assert len(record.calls) == 1
        assert _examine(model[int(name)], record).verified
    with torch.no_grad():
        model[0].weight[1, 1] += 1
    for name, record in records.items():
        assert _examine(model[int(name)], record).damage == "weight: 1 of 32 elements are not those that were sent"
