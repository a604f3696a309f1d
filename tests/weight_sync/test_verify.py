"""Layouts with vLLM's contract, and unknown ones: proof is proof, and the rest is "not verified"; held adapters.

Which layers are verified on devices that need no special reload. What is kept of a load: test_accelerator.py.
"""

import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_precision.integration.rollout.load_recorder import choose_layers, comparable
from verl_precision.weight_sync.verify import LayerRecord, NotVerifiableError, default_dtype, find_damage, not_held


def _method(process, **apply) -> SimpleNamespace:
    """A layer's method in vLLM: it packs weights after loading and, unless the guard cannot call it, computes."""
    return SimpleNamespace(process_weights_after_loading=process, **apply)


def _hide(layer) -> None:
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _pack(layer) -> None:
    """vLLM's contract for packed kernels on a CPU: the weight is emptied, a closure holds the kernel's own copy.

    The empty rest gets whatever dtype is torch's default at that moment.
    """
    packed = layer.weight.detach().t().contiguous()
    layer.cpu_linear = lambda x, weight, bias: x.float() @ packed.float()
    _hide(layer)


def _compute(layer, x, bias=None) -> torch.Tensor:
    return layer.cpu_linear(x, layer.weight, bias)


def _rename(layer) -> None:
    """Pack a layer that has been loaded again under another name, and never the layer that serves."""
    if hasattr(layer, "serves"):
        layer.packed = layer._parameters.pop("weight")
    layer.serves = True


WIDTHS = itertools.count(1)
PACKED = _method(_pack, apply=_compute)
# As the causal convolution on AMX: the parameter itself is packed.
PACKED_IN_PLACE = _method(lambda layer: layer.weight.copy_(layer.weight.flip(0)))
HIDDEN = _method(_hide)  # a kernel nobody has told the guard about: emptied weight, and nothing to call
# A layout that depends on when it was made: never the same twice.
RESHAPED = _method(lambda layer: setattr(layer.weight, "data", layer.weight.data.reshape(-1, next(WIDTHS))))
RENAMED = _method(_rename)
BREAKS = _method(lambda layer: 1 // 0)  # post-processing that works once only
UNSTEADY = _method(_pack, apply=lambda layer, x, bias=None: _compute(layer, x) + torch.rand(()))


def _load(param, loaded_weight) -> None:
    param.data.copy_(loaded_weight)


def _layer(method, sent: torch.Tensor, held: torch.Tensor, built_under: torch.dtype):
    """Return a live layer that holds `held`, built under a default dtype, and the record of `sent`."""
    layer = nn.Module()
    layer.weight, layer.quant_method = nn.Parameter(held.clone(), requires_grad=False), method
    with default_dtype(built_under):
        if method is not BREAKS:
            method.process_weights_after_loading(layer)
    template = nn.Parameter(torch.empty((6, 4), dtype=sent.dtype, device="meta"), requires_grad=False)
    call = inspect.signature(_load).bind(None, sent.clone())
    return layer, LayerRecord({"weight": template}, {"weight": _load}, [("weight", call)])


def _damage(method, damaged=False, built_under=torch.bfloat16, model_dtype=torch.bfloat16):
    sent = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(model_dtype)
    held = sent.clone()
    held[2, 3] += int(damaged)
    layer, record = _layer(method, sent, held, built_under)
    return find_damage(layer, record, repack=True, model_dtype=model_dtype)


@pytest.mark.parametrize("method", [PACKED, PACKED_IN_PLACE])
def test_a_damaged_packed_copy_is_proof(method):
    assert _damage(method) is None
    assert _damage(method, damaged=True) is not None


@pytest.mark.parametrize(("method", "reason"), [
    (HIDDEN, "this guard cannot run that kernel"),
    (RESHAPED, r"weight is bfloat16\[\d+, \d+\], and bfloat16\[\d+, \d+\] if built afresh"),
    (RENAMED, "only one of the live layer and a rebuilt layer has packed, weight"),
    (BREAKS, "cannot be rebuilt for comparison .ZeroDivisionError: .*by zero."),
    (UNSTEADY, "a different result at each call"),
])  # fmt: skip
@pytest.mark.parametrize("damaged", [False, True])
def test_an_unknown_layout_is_not_verified_and_never_a_failed_sync(method, reason, damaged):
    with pytest.raises(NotVerifiableError, match=reason):
        _damage(method, damaged=damaged)


def test_the_live_layer_is_left_as_it_was():
    sent = torch.randn(6, 4).bfloat16()
    layer, record = _layer(PACKED, sent, sent, torch.bfloat16)
    weight, kernel, default = layer.weight, layer.cpu_linear, torch.get_default_dtype()
    find_damage(layer, record, repack=True, model_dtype=torch.bfloat16)
    assert layer.weight is weight and layer.cpu_linear is kernel and torch.get_default_dtype() is default


LAYERS = [f"layers.{layer}.self_attn.{leaf}" for layer in range(3) for leaf in ("q_proj", "o_proj")]
NAMES = [f"base_model.model.model.{layer}.lora_{part}.weight" for layer in LAYERS for part in "AB"]
SENT = {name: torch.randn(8, 64) if "lora_A" in name else torch.randn(32, 8) for name in NAMES}


def held(scaling: float) -> dict[str, torch.Tensor]:
    """As vLLM keeps it: rounded, B times the scaling, in the middle of a larger buffer, under its own names."""
    kept = {}
    for name, tensor in SENT.items():
        buffer = torch.full((2, 1, 40, 72), 9.0, dtype=torch.float16)
        rows, columns = tensor.shape
        buffer[1, 0, :rows, :columns] = tensor.half() * (scaling if "lora_B" in name else 1)
        kept[f"language_model.{name.removesuffix('.weight')}"] = buffer[1, 0, :rows, :columns]
    return kept


def missing(items, scaling: float = 2.0) -> list[str]:
    return not_held(SENT, items, torch.float16, scaling)


def test_an_adapter_that_is_held_is_held_in_any_order():
    for scaling in (1.0, 2.0, 2.83):
        assert missing(reversed(held(scaling).items()), scaling) == []
    renamed = {f"transformer.h.{place}.lora_A": each for place, each in enumerate(held(2.0).values())}
    assert missing(renamed.items()) == [], "places that vLLM has other names for"


def test_what_is_missing_changed_or_scaled_otherwise_is_named():
    found = held(2.0)
    assert missing([]) == sorted(NAMES) and missing(list(found.items())[1:]) == NAMES[:1]
    name = list(found)[2]
    found[name] = found[name].clone()
    found[name].view(torch.int16)[7, 63] ^= 1
    assert missing(found.items()) == [NAMES[2]]
    assert missing(held(1.0).items()) == [name for name in sorted(NAMES) if "lora_B" in name]


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
