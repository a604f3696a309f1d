"""Choose layers to verify, and record what they are sent where loading again needs no special reload."""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from verl_precision.weight_sync.verify import LayerRecord, layers_with_parameters

# Methods, by class name, that change no parameter after loading on an accelerator, so that parameters can be compared
# as they are. Others (quantised, shuffled expert weights) are not verified, and counted.
_COMPARABLE_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"}

# Parameter elements verified in one sync: all layers of a tiny model; 128 MiB in BF16, milliseconds on an accelerator.
ELEMENTS_PER_SYNC = 1 << 26


def comparable(layer: nn.Module) -> bool:
    """Return whether a layer's parameters stay, on an accelerator, what its loaders wrote."""
    return type(getattr(layer, "quant_method", None)).__name__ in _COMPARABLE_METHODS


def choose_layers(
    model: nn.Module, sync_index: int, accept: Callable[[nn.Module], bool], budget: int = ELEMENTS_PER_SYNC
) -> set[str]:
    """Choose the layers to verify in this sync: the first, the last, and a window that moves on with every sync.

    Args:
        model: Model of the rollout.
        sync_index: 0, 1, ...; every accepted layer is chosen within a bounded number of syncs.
        accept: Tells which layers can be verified.
        budget: Largest number of parameter elements to verify; the first and the last layer are always chosen.

    Returns:
        Names of layers with parameters of their own.
    """
    layers = {name: layer for name, layer in layers_with_parameters(model).items() if accept(layer)}
    sizes = {name: sum(p.numel() for p in layer.parameters(recurse=False)) for name, layer in layers.items()}
    names = list(sizes)
    chosen = {*names[:1], *names[-1:]}
    spent = sum(sizes[name] for name in chosen)
    # Each sync starts at another layer; the golden ratio spreads the starts evenly over the model.
    start = int(sync_index * 0.618033988749895 * len(names)) % max(1, len(names))
    for name in names[start:] + names[:start]:
        if name not in chosen and spent + sizes[name] <= budget:
            chosen.add(name)
            spent += sizes[name]
    return chosen


@contextlib.contextmanager
def record_loads(model: nn.Module, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Record the calls of the named layers' weight loaders inside the block.

    Args:
        model: Model of the rollout.
        layers: Names of the layers to record.

    Yields:
        Layer name -> what it was sent, filled while loading. Tensors are copied, since transfer buffers are reused.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    records: dict[str, LayerRecord] = {}
    holders: dict[Any, list[tuple[str, LayerRecord]]] = defaultdict(
        list
    )  # parameter -> who holds it; tied layers share
    for name in layers:
        template = dict(model.get_submodule(name).named_parameters(recurse=False))
        loaders = {
            key: getattr(parameter, "weight_loader", default_weight_loader) for key, parameter in template.items()
        }
        records[name] = LayerRecord(template, loaders)
        for key, parameter in template.items():
            holders[parameter].append((key, records[name]))
    before = {parameter: getattr(parameter, "weight_loader", None) for parameter in holders}
    for parameter, held_by in holders.items():
        parameter.weight_loader = _recording(before[parameter] or default_weight_loader, held_by)
    try:
        yield records
    finally:
        for parameter, loader in before.items():
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


def _recording(loader: Callable[..., Any], holders: list[tuple[str, LayerRecord]]) -> Callable[..., Any]:
    """Return a loader that notes each call for every layer that holds the parameter, then loads."""
    signature = inspect.signature(loader)

    def recording_loader(*args: Any, **kwargs: Any) -> Any:
        copies: Any = {
            key: value.detach().clone() if isinstance(value, torch.Tensor) and key != "param" else value
            for key, value in signature.bind(*args, **kwargs).arguments.items()
        }
        for parameter_name, record in holders:
            record.calls.append((parameter_name, inspect.BoundArguments(signature, dict(copies))))
        return loader(*args, **kwargs)

    return recording_loader
