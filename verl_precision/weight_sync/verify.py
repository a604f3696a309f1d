"""Does a layer compute what the weights it was sent say? Compared with a layer built afresh from those weights.

A kernel may keep a packed copy of a weight, so that reading parameters back is not enough (a tied output head on
vLLM's CPU backend keeps the old copy, silently). The reference is built by the layer's own loaders and its own packing,
in the context in which vLLM built the live layer, and it runs through the same kernel. So the comparison is exact, and
a difference is proof. Where the reference cannot be compared with the live layer, the verdict is "not verified".
"""

import contextlib
import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.weight_sync.manifest import bit_view

# Rows of the probe input: more than one, so that kernels specialised for a single row are not what is compared.
_PROBE_ROWS = 4

logger = logging.getLogger("verl_precision.weight_sync")


@dataclass
class LayerRecord:
    """What one layer was sent in one sync.

    Attributes:
        template: the layer's parameters before any packing (on the meta device, or live where nothing is packed).
        loaders: parameter name -> the layer's own weight loader, without wrappers.
        calls: (parameter name, bound arguments) of each loader call, in order; the tensors are private copies.
    """

    template: dict[str, nn.Parameter]
    loaders: dict[str, Callable[..., Any]]
    calls: list[tuple[str, inspect.BoundArguments]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """What the guard knows of one layer; with neither field set, the layer is verified.

    Attributes:
        damage: proof that the layer does not compute what it was sent, or None.
        unknown: why the layer could not be verified, or None.
    """

    damage: str | None = None
    unknown: str | None = None

    @property
    def verified(self) -> bool:
        """Whether the layer computes exactly what it was sent."""
        return self.damage is None and self.unknown is None


def shared_parameter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the layers that hold a parameter which another layer holds as well (tied weights)."""
    holders = Counter(id(p) for layer in model.modules() for p in layer._parameters.values() if p is not None)
    for name, layer in model.named_modules():
        if any(p is not None and holders[id(p)] > 1 for p in layer._parameters.values()):
            yield name, layer


@torch.no_grad()
def examine(layer: nn.Module, record: LayerRecord, repack: bool, model_dtype: torch.dtype) -> Verdict:
    """Compare a layer with one built afresh from the weights it was sent.

    Compares every parameter bit for bit, then, where the layer computes with a packed copy, its output on a fixed
    probe input.

    Args:
        layer: the layer the rollout uses; not modified.
        record: what it was sent. Parameters without a call keep the live values.
        repack: whether the live layer was post-processed after loading, so that the reference must be as well.
        model_dtype: of the rollout's model: torch's default dtype while vLLM builds a layer.

    Returns:
        The verdict. A reference that cannot be built or compared makes it `unknown`, never `damage`.
    """
    try:
        reference = _rebuild(layer, record, repack, model_dtype)
    except Exception as error:  # a layout that this guard does not know is no fault of the sync
        logger.debug("%s cannot be built afresh", type(layer).__name__, exc_info=True)
        return Verdict(unknown=f"it cannot be built afresh ({type(error).__name__}: {error})")
    packed_away = False
    for name, expected in reference._parameters.items():
        found = layer._parameters.get(name)
        if expected is None or found is None:
            continue
        if not expected.numel() and not found.numel():
            # The kernel has its own copy; the empty rest has whatever dtype was torch's default when it was made.
            packed_away |= name in record.template and record.template[name].numel() > 0
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            return Verdict(unknown=f"{name} is {_described(found)}, and {_described(expected)} in a layer built afresh")
        elif unequal := int((bit_view(found) != bit_view(expected)).sum()):
            return Verdict(damage=f"{name}: {unequal} of {expected.numel()} elements are not those that were sent")
    if packed_away or hasattr(reference, "cpu_linear"):
        return _compare_outputs(layer, reference, record)
    return Verdict()


def post_process(layer: nn.Module) -> None:
    """Run the layer's own packing, as vLLM does after the first load."""
    method: Any = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)


def forget_expert_kernel(layer: nn.Module) -> None:
    """Make the next packing of an expert layer a first one, on a CPU.

    vLLM packs expert weights for its CPU kernel only while it builds that kernel. Loaded again, they would stay as they
    came and be read as if packed: the experts compute with permuted weights, without a word.
    """
    method: Any = getattr(layer, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype torch's default inside the block, as vLLM does while it builds and packs a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _rebuild(layer: nn.Module, record: LayerRecord, repack: bool, model_dtype: torch.dtype) -> Any:
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
        with default_dtype(model_dtype):
            post_process(reference)
    return reference


def _fresh(template: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter with the template's class and attributes."""
    fresh = torch.empty_like(template, device=device)
    fresh.__class__ = template.__class__
    fresh.__dict__ = template.__dict__.copy()
    return fresh  # type: ignore[return-value]


def _compare_outputs(layer: Any, reference: Any, record: LayerRecord) -> Verdict:
    """Compare what two layers with packed weights compute from one fixed random input."""
    weight = record.template.get("weight")
    if weight is None or weight.dim() != 2 or not hasattr(getattr(layer, "quant_method", None), "apply"):
        return Verdict(unknown="its kernel keeps a packed copy that this guard cannot run")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, weight.shape[-1], generator=generator).to(weight.dtype)
    expected, live, once_more = (_output(one, probe) for one in (reference, layer, layer))
    if not torch.equal(bit_view(live), bit_view(once_more)):
        return Verdict(unknown="its kernel gives another result each time")
    if live.shape != expected.shape or not torch.equal(bit_view(live), bit_view(expected)):
        return Verdict(damage="it computes with a packed copy of other weights than it was sent")
    return Verdict()


def _output(layer: Any, probe: Tensor) -> Tensor:
    return layer.quant_method.apply(layer, probe, bias=None)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
