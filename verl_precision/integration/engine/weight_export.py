"""Weights on their way to the rollout and into an export: as exact as the trainer holds them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import write_file
from verl_precision.integration.engine.adapters import (
    COPY,
    OF_ADAPTER,
    layers_without_weights,
    sources,
    unmerged,
    untied,
)

MODEL = "actor_rollout_ref.model"


def adapter_layers(module: Any, merges: bool, targets: object = None) -> dict[str, Any]:
    """Return the layers of an actor's adapter, without weights; refuse an adapter that the rollout cannot be sent."""
    if not isinstance(module, PeftModel):
        return {}
    layers, names = layers_without_weights(module), list(module.state_dict())
    found, parameters = sources(names, layers), dict(module.named_parameters(remove_duplicate=False))
    if merges:
        base: Any = module.get_base_model()
        tied, remedy = base.all_tied_weights_keys, f", or set {MODEL}.lora.merge=False"
        lost = untied(found, tied, lambda one, other: parameters[one] is parameters[other])
        problem = "in the rollout it is one matrix with another (tie_word_embeddings), and the adapter parts them"
    else:
        remedy = f", or set {MODEL}.lora.merge=True"
        lost = [name for name, layer in layers.items() if getattr(layer, "num_experts", 1) > 1]
        lost += [name for name in names if COPY in name]
        problem = "vLLM serves no adapter of experts, and no module that was trained whole (modules_to_save)"
    if unknown := unmerged(found):
        lost, problem, remedy = unknown, "PEFT does not merge it, nor does vLLM serve it", ""
    if lost:
        raise ConfigurationError(
            f"{lost[0]} of the adapter cannot be sent to the rollout: {problem}", setting=f"{MODEL}.target_modules",
            value=str(targets), allowed="modules that merging, or vLLM, can take",
            remedy=f"Leave it out of the adapter{remedy}.",
        )  # fmt: skip
    return layers


def merged_lora(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with LoRA merged, as verl names them, in FP32: merged apart from the model, which stays."""
    from verl.utils.fsdp_utils import offload_fsdp_model_to_cpu
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    try:
        names, whole = _state(engine)
        wrapped = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
        known = getattr(engine, "adapter_layers", None)  # from before FSDP
        layers = adapter_layers(wrapped, merges=True) if known is None else known
        found = convert_weight_keys(sources(names, layers), wrapped).items()
        merged = ((name, source.value(whole).detach().clone()) for name, source in found)  # a whole may be live storage
        yield from unfuse_moe_params(merged, engine.model_config.hf_config.model_type)
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(engine.module)


def served_lora(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter that the rollout serves, by PEFT's names; of FSDP1 PEFT itself returns none."""
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
    """Say in an exported model's config.json which dtype it was trained to be used in.

    verl writes the dtype of the model the run started from, BF16 for most: who loads the export by its config would
    round the weights to it. The weights themselves are exported in FP32. Nothing is done without a config.json.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)  # the older name
    settings["dtype"] = dtype
    write_file(path, json.dumps(settings, indent=2) + "\n", replace=True)
