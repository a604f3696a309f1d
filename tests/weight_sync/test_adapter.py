"""What vLLM's buffers hold of a LoRA adapter, compared with what was sent."""

import torch

from verl_precision.weight_sync.adapter import not_held


def _adapter() -> dict[str, torch.Tensor]:
    names = [f"layers.{layer}.q_proj.lora_{part}.weight" for layer in range(3) for part in "AB"]
    return {name: torch.randn(8, 64) if "lora_A" in name else torch.randn(32, 8) for name in names}


def _held(sent: dict[str, torch.Tensor], scaling: float) -> list[torch.Tensor]:
    """As vLLM keeps it: rounded, B times the scaling, in the middle of a larger buffer."""
    kept = []
    for name, tensor in sent.items():
        buffer = torch.full((2, 1, 40, 72), 9.0, dtype=torch.float16)
        rows, columns = tensor.shape
        buffer[1, 0, :rows, :columns] = tensor.half() * (scaling if "lora_B" in name else 1)
        kept.append(buffer[1, 0, :rows, :columns])
    return kept


def test_an_adapter_that_is_held_is_held_in_any_order():
    sent = _adapter()
    for scaling in (1.0, 2.0, 2.83):
        assert not_held(sent, reversed(_held(sent, scaling)), torch.float16, scaling) == []


def test_what_is_missing_changed_or_scaled_otherwise_is_named():
    sent = _adapter()
    names, held = list(sent), _held(sent, 2.0)
    assert not_held(sent, [], torch.float16, 2.0) == sorted(sent)
    assert not_held(sent, held[1:], torch.float16, 2.0) == names[:1]
    held[2] = held[2].clone()
    held[2].view(torch.int16)[7, 63] ^= 1
    assert not_held(sent, held, torch.float16, 2.0) == [names[2]]
    assert not_held(sent, _held(sent, 1.0), torch.float16, 2.0) == [name for name in sorted(sent) if "lora_B" in name]
