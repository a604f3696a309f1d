"""Choose layers and record what they are sent, on devices where loading again needs no special reload."""

import contextlib
import inspect
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

    records: dict[str, LayerRecord] = {}
    wrapped: list[tuple[nn.Parameter, bool, Callable[..., Any]]] = []
    for name, layer in model.named_modules():
        if name not in layers:
            continue
        template = dict(layer.named_parameters(recurse=False))
        loaders = {key: getattr(p, "weight_loader", default_weight_loader) for key, p in template.items()}
        records[name] = LayerRecord(template=template, loaders=loaders)
        for key, parameter in template.items():
            wrapped.append((parameter, hasattr(parameter, "weight_loader"), loaders[key]))
            parameter.weight_loader = _recording(loaders[key], key, records[name])  # type: ignore[attr-defined]
    try:
        yield records
    finally:
        for parameter, had_loader, loader in wrapped:
            if had_loader:
                parameter.weight_loader = loader  # type: ignore[attr-defined]
            else:
                del parameter.weight_loader  # type: ignore[attr-defined]


def _recording(loader: Callable[..., Any], parameter_name: str, record: LayerRecord) -> Callable[..., Any]:
    signature = inspect.signature(loader)

    def recording_loader(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) and key != "param" else value
                for key, value in bound.arguments.items()
            }
        )
        record.calls.append((parameter_name, bound))
        return loader(*args, **kwargs)

    return recording_loader
