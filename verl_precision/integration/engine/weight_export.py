"""Weights for the rollout and for an export, with the full precision that the trainer has.

With a LoRA adapter each tensor is merged as PEFT does it, in FP32, one at a time. Nothing is merged in place, because
two names may share one storage (tied embeddings, layers that an adapter repeats).
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file

MODEL = "actor_rollout_ref.model"
PREFIX = "base_model.model."
# Names of a module's trained copy, and of the original behind it.
COPY, _COPIED = ".modules_to_save.default", ".original_module."
OF_ADAPTER = re.compile(r"(|.*\.)(lora_\w+|token_adapter)\..*")
_OF_LAYER = re.compile(r"(.*?)\.((?:base_layer|lora_\w+)\..*)")


@dataclass(frozen=True)
class Source:
    """A tensor of the model, and the parts that it is made of."""

    name: str  # in the state dict
    layer: Any = None  # of the adapter, without weights; None: no adapter is on the tensor
    parts: Mapping[str, str] = field(default_factory=dict)  # names in that layer -> names in the state dict

    @torch.no_grad()
    def value(self, whole: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor, merged in FP32 if an adapter is on it; `whole` returns a tensor of the state dict."""
        if self.layer is None:
            return whole(self.name)
        layer, own = copy.deepcopy(self.layer), next(part for part, name in self.parts.items() if name == self.name)
        weights = {part: whole(name).to(torch.float32, copy=True) for part, name in self.parts.items()}
        layer.load_state_dict(weights, assign=True, strict=False)
        for adapter in _adapters_on(layer, own):
            adapter.merge()
        return layer.get_parameter(own).detach()


def layers_without_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Return copies of a model's LoRA layers, by name and without weights; of nested layers only the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if issubclass(type(module), lora.LoraLayer) and name.partition(".base_layer")[0] not in found:
            memo: dict[int, Any] = {id(x): _empty(x) for x in module.buffers()}
            memo |= {id(x): nn.Parameter(_empty(x), x.requires_grad) for x in module.parameters()}
            found[name] = copy.deepcopy(module, memo)
    return found


def sources(names: Iterable[str], layers: Mapping[str, nn.Module]) -> dict[str, Source]:
    """Return the source of each tensor of a model, by its name without PEFT's parts; `names` are the state dict's."""
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
            # Experts are large, so each of their tensors is merged alone; a weight and its bias are merged together.
            beside = {part: name} if isinstance(layers[layer], lora.ParamWrapper) else base
            found[_plain(name)] = Source(name, layers[layer], adapter | beside) if part in adapted else Source(name)
        found |= {} if adapted else {_plain(name): Source(name) for name in adapter.values()}
    return found


def unmerged(found: Mapping[str, Source]) -> list[str]:
    """Return the tensors of an adapter that are not merged into any weight."""
    return [source.name for name, source in found.items() if OF_ADAPTER.fullmatch(name)]


def untied(found: Mapping[str, Source], tied: Mapping[str, str], same: Callable[[str, str], bool]) -> list[str]:
    """Return the tensors that differ from those they are tied to (`tied`): one has an adapter, or a trained copy."""
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


def adapter_layers(module: Any, merges: bool, targets: object) -> dict[str, Any]:
    """Return an adapter's layers, without weights; refuse an adapter that cannot be sent to the rollout."""
    if not isinstance(module, PeftModel):
        return {}
    layers, names = layers_without_weights(module), list(module.state_dict())
    found, parameters = sources(names, layers), dict(module.named_parameters(remove_duplicate=False))
    if merges:
        base: Any = module.get_base_model()
        tied, remedy = base.all_tied_weights_keys, f", or set {MODEL}.lora.merge=False"
        lost = untied(found, tied, lambda one, other: parameters[one] is parameters[other])
        problem = "in the rollout two modules share this matrix (tie_word_embeddings), and the adapter changes only one"
    else:
        remedy = f", or set {MODEL}.lora.merge=True"
        lost = [name for name, layer in layers.items() if getattr(layer, "num_experts", 1) > 1]
        lost += [name for name in names if COPY in name]
        problem = "vLLM serves neither adapters of experts nor modules that are trained in full (modules_to_save)"
    if unknown := unmerged(found):
        lost, problem, remedy = unknown, "PEFT does not merge it, and vLLM does not serve it", ""
    if lost:
        raise ConfigurationError(
            f"{lost[0]} of the adapter cannot be sent to the rollout: {problem}", setting=f"{MODEL}.target_modules",
            value=str(targets), allowed="modules that PEFT can merge, or vLLM can serve",
            remedy=f"Leave it out of the adapter{remedy}.",
        )  # fmt: skip
    return layers


def merged_lora(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with LoRA merged in FP32, under verl's names; the model itself is not changed."""
    from verl.utils.fsdp_utils import offload_fsdp_model_to_cpu
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    try:
        names, whole = _state(engine)
        wrapped = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
        found = convert_weight_keys(sources(names, engine.adapter_layers), wrapped).items()
        merged = ((name, source.value(whole).detach().clone()) for name, source in found)  # `whole` may be live storage
        yield from unfuse_moe_params(merged, engine.model_config.hf_config.model_type)
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(engine.module)


def served_lora(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors by PEFT's names, for a rollout that serves it; under FSDP1 PEFT returns none."""
    names, whole = _state(engine)
    yield from ((name.replace(".default", ""), whole(name)) for name in names if OF_ADAPTER.fullmatch(name))


def _state(engine: Any) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names in an engine's state dict, and a function that returns a tensor of it, whole."""
    from verl.utils.device import get_device_id

    device = get_device_id()
    state = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in engine.module.state_dict().items()}

    def whole(name: str) -> Tensor:
        weight = state[name]
        if isinstance(weight, DTensor):
            return weight.to(device, non_blocking=True).full_tensor()  # type: ignore[attr-defined, no-any-return]
        return weight

    return list(state), whole


def write_export_dtype(folder: str, dtype: str) -> None:
    """Write the trainer's compute dtype into an exported model's config.json, where verl writes the first model's."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)  # the older name
    settings["dtype"] = dtype
    write_file(path, json.dumps(settings, indent=2) + "\n", replace=True)
