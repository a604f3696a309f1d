"""The weights of a model with a LoRA adapter: each tensor as PEFT merges it, in FP32, one at a time.

Nothing is merged in place. That would move both of two names that have one storage (tied embeddings, layers that an
adapter repeats), and a live model would have to be put back.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

PREFIX = "base_model.model."
# Trained instead of a module, and the module that it stands for.
COPY, _COPIED = ".modules_to_save.default", ".original_module."
OF_ADAPTER = re.compile(r"(|.*\.)(lora_\w+|token_adapter)\..*")
_OF_LAYER = re.compile(r"(.*?)\.((?:base_layer|lora_\w+)\..*)")


@dataclass(frozen=True)
class Source:
    """What a tensor of the model is made of."""

    name: str  # in the state dict
    layer: Any = None  # of the adapter, without weights; None: the tensor is taken as it is
    parts: Mapping[str, str] = field(default_factory=dict)  # names in that layer -> names in the state dict

    @torch.no_grad()
    def value(self, whole: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor, merged in FP32 if an adapter is on it; `whole` returns one of the state dict."""
        if self.layer is None:
            return whole(self.name)
        layer, own = copy.deepcopy(self.layer), next(part for part, name in self.parts.items() if name == self.name)
        weights = {part: whole(name).to(torch.float32, copy=True) for part, name in self.parts.items()}
        layer.load_state_dict(weights, assign=True, strict=False)
        for adapter in _adapters_on(layer, own):
            adapter.merge()
        return layer.get_parameter(own).detach()


def layers_without_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Return copies of a model's LoRA layers, by name and without weights; of nested ones the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if issubclass(type(module), lora.LoraLayer) and name.partition(".base_layer")[0] not in found:
            memo: dict[int, Any] = {id(x): _empty(x) for x in module.buffers()}
            memo |= {id(x): nn.Parameter(_empty(x), x.requires_grad) for x in module.parameters()}
            found[name] = copy.deepcopy(module, memo)
    return found


def sources(names: Iterable[str], layers: Mapping[str, nn.Module]) -> dict[str, Source]:
    """Return what each tensor of a model is made of, by its name without PEFT's parts.

    `names` are those of the state dict, `layers` its layers without weights. What an adapter has beyond layers that
    PEFT merges is an entry of its own: see `unmerged`.
    """
    found: dict[str, Source] = {}
    of_layer: dict[str, dict[str, str]] = {}
    for name in names:
        if (match := _OF_LAYER.fullmatch(name)) and match[1] in layers:
            of_layer.setdefault(match[1], {})[match[2]] = name
        elif _COPIED not in name:
            found[_plain(name)] = Source(name)
    for layer, parts in of_layer.items():
        adapter = {part: name for part, name in parts.items() if OF_ADAPTER.fullmatch(part)}
        base = {part: name for part, name in parts.items() if part not in adapter}
        adapted = {part for part in base if _adapters_on(layers[layer], part)}
        for part, name in base.items():
            # Experts are large, and their tensors merged apart; a weight and its bias are not.
            beside = {part: name} if isinstance(layers[layer], lora.ParamWrapper) else base
            found[_plain(name)] = Source(name, layers[layer], adapter | beside) if part in adapted else Source(name)
        found |= {} if adapted else {_plain(name): Source(name) for name in adapter.values()}
    return found


def unmerged(found: Mapping[str, Source]) -> list[str]:
    """Return the tensors of an adapter that are merged into nothing."""
    return [source.name for name, source in found.items() if OF_ADAPTER.fullmatch(name)]


def untied(found: Mapping[str, Source], tied: Mapping[str, str], same: Callable[[str, str], bool]) -> list[str]:
    """Return the tensors that are no longer what they are tied to (`tied`): an adapter is on one, or it has a copy.

    `same` says whether two tensors of the state dict are equal.
    """
    pairs = ((name, found[name], found[other]) for name, other in tied.items() if name in found and other in found)
    return [name for name, one, other in pairs if one.layer or other.layer or not same(one.name, other.name)]


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer", "").replace(COPY, "")


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _adapters_on(layer: nn.Module, part: str) -> list[Any]:
    """Return the adapters in a layer that change a tensor of the module in it."""
    leaf = part.rpartition(".")[2]
    found: list[Any] = []
    for module in layer.modules():
        if isinstance(module, lora.ParamWrapper):
            found += [module] if module.parameter_name == leaf else []
        elif isinstance(module, lora.LoraLayer):
            found += [module] if leaf == "weight" or any(module.lora_bias.values()) else []
    return found
