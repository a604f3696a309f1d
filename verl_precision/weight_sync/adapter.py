"""Does the rollout compute with the LoRA adapter that it was sent? Its buffers are compared with it. Pure torch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verl_precision.weight_sync.manifest import StreamDigest


def not_held(
    sent: Mapping[str, Tensor], held: Iterable[tuple[str, Tensor]], dtype: torch.dtype, scaling: float
) -> list[str]:
    """Return, sorted, the names of an adapter's tensors that are not, to the bit, in the buffers of their layer.

    `sent` are A and B under PEFT's names, `held` what the rollout's layers compute with, under names that end in
    `.lora_A` or `.lora_B`. The rollout has rounded both to `dtype`, and then multiplied B by `scaling`. A layer's place
    is its name from its number on: what stands before is not the same in both models. A tensor whose place the rollout
    does not have may be in any buffer.
    """
    expected, found, places = StreamDigest(), StreamDigest(), list[str]()
    for name, tensor in sent.items():
        expected.add(name, tensor.to(dtype) * scaling if "lora_B" in name else tensor.to(dtype))
    for name, tensor in held:
        found.add(str(len(places)), tensor)
        places.append(_place(name))
    there = {(place, str(one)) for place, one in zip(places, found.fetch().values(), strict=True)}
    there |= {("anywhere", digest) for _, digest in there}
    return sorted(
        name
        for name, one in expected.fetch().items()
        if ((place if (place := _place(name)) in places else "anywhere"), str(one)) not in there
    )


def _place(name: str) -> str:
    """Return `layers.3.mlp.up_proj.lora_A` of `base_model.model.model.layers.3.mlp.up_proj.lora_A.weight`."""
    parts = name.removesuffix(".weight").split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[first - 1 :])
