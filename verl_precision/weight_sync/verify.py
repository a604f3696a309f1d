"""Does a layer compute what the weights it was sent say? Compared with a layer built afresh from those weights.

A kernel may keep a repacked copy of a weight, so reading parameters back is not enough (a tied output head on vLLM's
CPU backend keeps the old one, silently). The reference is built by the layer's own loaders and its own
post-processing, and runs through the same kernel, so the comparison is exact: no tolerance.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.weight_sync.manifest import bit_view

# Rows of the probe input: more than one, so that kernels specialised for a single row are not what is compared.
_PROBE_ROWS = 4


@dataclass
class LayerRecord:
    """What one layer was sent in one sync.

    Attributes:
        template: the layer's parameters before any repacking (on the meta device, or live where nothing is repacked).
        loaders: parameter name -> the layer's own weight loader, without wrappers.
        calls: (parameter name, bound arguments) of each loader call, in order; the tensors are private copies.
    """

    template: dict[str, nn.Parameter]
    loaders: dict[str, Callable[..., Any]]
    calls: list[tuple[str, inspect.BoundArguments]] = field(default_factory=list)


def shared_parameter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the layers that hold a parameter which another layer holds as well (tied weights)."""
    holders = Counter(id(p) for layer in model.modules() for p in layer._parameters.values() if p is not None)
    for name, layer in model.named_modules():
        if any(p is not None and holders[id(p)] > 1 for p in layer._parameters.values()):
            yield name, layer


@torch.no_grad()
def difference(layer: nn.Module, record: LayerRecord, repack: bool) -> str | None:
    """Say in what a layer differs from one built afresh from the weights it was sent, or return None.

    Compares every parameter bit for bit, then, where the layer computes with a repacked copy (`cpu_linear`), its output
    on a fixed probe input.

    Args:
        layer: the layer the rollout uses; not modified.
        record: what it was sent. Parameters without a call keep the live values.
        repack: whether the live layer was post-processed after loading, so that the reference must be as well.

    Returns:
        A phrase naming the parameter or the output, or None when they agree.
    """
    reference = _rebuild(layer, record, repack)
    for name, expected in reference._parameters.items():
        found = layer._parameters.get(name)
        if expected is None or found is None:
            continue
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{name} is {found.dtype}{list(found.shape)}, should be {expected.dtype}{list(expected.shape)}"
        unequal = int((bit_view(found) != bit_view(expected)).sum())
        if unequal:
            return f"{name}: {unequal} of {expected.numel()} elements are not those that were sent"
    if hasattr(reference, "cpu_linear"):
        probe = _probe_input(record.template["weight"])
        if not torch.equal(_output(layer, probe), _output(reference, probe)):
            return "it computes with a repacked copy of other weights than it holds"
    return None


def post_process(layer: nn.Module) -> None:
    """Run the layer's own repacking, as vLLM does after the first load."""
    method: Any = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)


def forget_expert_kernel(layer: nn.Module) -> None:
    """Make the next repacking of an expert layer a first one, on a CPU.

    vLLM packs expert weights for its CPU kernel only while it builds that kernel. Loaded again, they would stay as they
    came and be read as if packed: the experts compute with permuted weights, without a word.
    """
    method: Any = getattr(layer, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


def _rebuild(layer: nn.Module, record: LayerRecord, repack: bool) -> nn.Module:
    """Return a shallow copy with fresh parameters, loaded with what was sent; everything else is shared."""
    reference = copy.copy(layer)
    reference._parameters = dict(layer._parameters)
    for name in {name for name, _ in record.calls}:
        reference._parameters[name] = _fresh(record.template[name], device=layer._parameters[name].device)  # type: ignore[union-attr]
    for name, arguments in record.calls:
        arguments.arguments["param"] = reference._parameters[name]
        record.loaders[name](*arguments.args, **arguments.kwargs)
    if repack:
        if hasattr(reference, "quant_method"):  # its own: the live layer keeps its kernel
            object.__setattr__(reference, "quant_method", copy.copy(reference.quant_method))
        forget_expert_kernel(reference)
        post_process(reference)
    return reference


def _fresh(template: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter with the template's class and attributes."""
    fresh = torch.empty_like(template, device=device)
    fresh.__class__ = template.__class__
    fresh.__dict__ = template.__dict__.copy()
    return fresh  # type: ignore[return-value]


def _probe_input(weight: Tensor) -> Tensor:
    """Return a fixed random input for a linear layer or output head with a weight [out, in]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_ROWS, weight.shape[-1], generator=generator).to(weight.dtype)


def _output(layer: Any, probe: Tensor) -> Tensor:
    return layer.quant_method.apply(layer, probe, bias=None)
