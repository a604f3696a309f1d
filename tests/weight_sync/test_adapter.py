"""What vLLM's buffers hold of a LoRA adapter, compared with what was sent."""

import torch

from verl_precision.weight_sync.verify import not_held

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
