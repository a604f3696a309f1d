"""What vLLM's buffers hold of a LoRA adapter, compared with what was sent."""

import pytest
import torch

from verl_precision.weight_sync.adapter import not_held


def _adapter() -> dict[str, torch.Tensor]:
    layers = [f"layers.{layer}.self_attn.{leaf}" for layer in range(3) for leaf in ("q_proj", "o_proj")]
    names = [f"base_model.model.model.{layer}.lora_{part}.weight" for layer in layers for part in "AB"]
    return {name: torch.randn(8, 64) if "lora_A" in name else torch.randn(32, 8) for name in names}


def _held(sent: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """As vLLM keeps it: rounded, B times the scaling, in the middle of a larger buffer, under its own names."""
    kept = {}
    for name, tensor in sent.items():
        buffer = torch.full((2, 1, 40, 72), 9.0, dtype=torch.float16)
        rows, columns = tensor.shape
        buffer[1, 0, :rows, :columns] = tensor.half() * (scaling if "lora_B" in name else 1)
        kept[f"language_model.{name.removesuffix('.weight')}"] = buffer[1, 0, :rows, :columns]
    return kept


def test_an_adapter_that_is_held_is_held_in_any_order():
    sent = _adapter()
    for scaling in (1.0, 2.0, 2.83):
        assert not_held(sent, reversed(_held(sent, scaling).items()), torch.float16, scaling) == []
    renamed = {f"transformer.h.{place}.lora_A": held for place, held in enumerate(_held(sent, 2.0).values())}
    assert not_held(sent, renamed.items(), torch.float16, 2.0) == [], "places that vLLM has other names for"


def test_what_is_missing_changed_or_scaled_otherwise_is_named():
    sent = _adapter()
    names, held = list(sent), _held(sent, 2.0)
    assert not_held(sent, [], torch.float16, 2.0) == sorted(sent)
    assert not_held(sent, list(held.items())[1:], torch.float16, 2.0) == names[:1]
    changed = list(held)[2]
    held[changed] = held[changed].clone()
    held[changed].view(torch.int16)[7, 63] ^= 1
    assert not_held(sent, held.items(), torch.float16, 2.0) == [names[2]]
    without_scaling = _held(sent, 1.0).items()
    assert not_held(sent, without_scaling, torch.float16, 2.0) == [name for name in sorted(sent) if "lora_B" in name]


@pytest.mark.parametrize(("one", "two"), [
    ("0.self_attn.q_proj.lora_A", "1.self_attn.q_proj.lora_A"),
    ("0.self_attn.q_proj.lora_B", "2.self_attn.q_proj.lora_B"),
    ("1.self_attn.q_proj.lora_A", "1.self_attn.o_proj.lora_A"),
])  # fmt: skip
def test_tensors_of_two_layers_that_changed_places_are_named(one, two):
    sent = _adapter()
    held = _held(sent, 2.0)
    one, two = (next(name for name in held if place in name) for place in (one, two))
    held[one], held[two] = held[two], held[one]
    named = not_held(sent, held.items(), torch.float16, 2.0)
    assert named == sorted(f"{name.removeprefix('language_model.')}.weight" for name in (one, two))
