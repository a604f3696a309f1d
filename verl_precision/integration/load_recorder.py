"""Choose layers and record what they are sent, on devices where loading again needs no special reload."""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from verl_precision.weight_sync.verify import LayerRecord

# Methods whose post-processing changes nothing on an accelerator, by class name: their parameters can be compared as
# they are. Others (quantised, shuffled expert weights) are left out, and counted as such.
_COMPARABLE_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"}

# Elements verified per sync. At BF16 a copy of 128 MiB and milliseconds on an accelerator; all layers of a tiny model.
ELEMENTS_PER_SYNC = 1 << 26


def comparable(layer: nn.Module) -> bool:
    """Tell whether a layer's parameters stay, on an accelerator, what its loaders wrote."""
    return type(getattr(layer, "quant_method", None)).__name__ in _COMPARABLE_METHODS


def choose_layers(
    model: nn.Module, sync_index: int, accept: Callable[[nn.Module], bool], budget: int = ELEMENTS_PER_SYNC
) -> set[str]:
    """Choose the layers to verify in this sync: the first and the last, then a window that moves on with every sync.

    Args:
        model: the rollout's model.
        sync_index: 0, 1, ...; every accepted layer is chosen within a bounded number of syncs.
        accept: which layers can be verified.
        budget: parameter elements to verify at most; the first and last layer are always in.

    Returns:
        Names of layers with parameters of their own.
    """
    sizes = {
        name: sum(p.numel() for p in layer.parameters(recurse=False))
        for name, layer in model.named_modules()
        if accept(layer) and next(layer.parameters(recurse=False), None) is not None
    }
    names = list(sizes)
    if not names:
        return set()
    chosen = {names[0], names[-1]}
    spent = sum(sizes[name] for name in chosen)
    # Each sync starts at another layer; the golden ratio spreads the starts evenly over the model.
    start = int(sync_index * 0.618033988749895 * len(names)) % len(names)
    for name in names[start:] + names[:start]:
        if name not in chosen and spent + sizes[name] <= budget:
            chosen.add(name)
            spent += sizes[name]
    return chosen


@contextlib.contextmanager
def record_loads(model: nn.Module, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Record every weight-loader call on the named layers inside the block.

    Args:
        model: the rollout's model.
        layers: names of the layers to record.

    Yields:
        Layer name -> what it was sent, filled while loading; tensors are copied, since buckets are reused.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    holders: dict[int, list[tuple[str, LayerRecord]]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    records: dict[str, LayerRecord] = {}
    for name, layer in model.named_modules():
        if name not in layers:
            continue
        template = dict(layer.named_parameters(recurse=False))
        loaders = {key: getattr(p, "weight_loader", default_weight_loader) for key, p in template.items()}
        records[name] = LayerRecord(template=template, loaders=loaders)
        for key, parameter in template.items():
            holders[id(parameter)].append((key, records[name]))
            parameters[id(parameter)] = parameter
    # Once a parameter: tied layers hold the same one, and a recorder around a recorder would see no signature.
    before = {key: getattr(parameter, "weight_loader", None) for key, parameter in parameters.items()}
    for key, parameter in parameters.items():
        parameter.weight_loader = _recording(before[key] or default_weight_loader, holders[key])  # type: ignore[attr-defined]
    try:
        yield records
    finally:
        for key, parameter in parameters.items():
            if before[key] is None:
                del parameter.weight_loader  # type: ignore[attr-defined]
            else:
                parameter.weight_loader = before[key]  # type: ignore[attr-defined]


def _recording(loader: Callable[..., Any], holders: list[tuple[str, LayerRecord]]) -> Callable[..., Any]:
    """Return a loader that notes each call for every layer that holds the parameter, then loads."""
    signature = inspect.signature(loader)

    def recording_loader(*args: Any, **kwargs: Any) -> Any:
        private = {
            key: value.detach().clone() if isinstance(value, torch.Tensor) and key != "param" else value
            for key, value in signature.bind(*args, **kwargs).arguments.items()
        }
        for parameter_name, record in holders:
            record.calls.append((parameter_name, inspect.BoundArguments(signature, dict(private))))  # type: ignore[arg-type]
        return loader(*args, **kwargs)

    return recording_loader
