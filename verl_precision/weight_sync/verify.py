"""Does a layer compute with the weights that were sent? It is compared with a layer that is rebuilt from those weights.

Reading parameters back is not enough, since a kernel may compute with a packed copy of a weight. So the reference is
built by the layer's own loaders and packing, in the context in which vLLM built the live layer, and runs through the
same kernel. The comparison is exact: a difference is proof.
"""

import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.weight_sync.manifest import StreamDigest, bit_view, dtype_name

_PROBE_ROWS = 4  # more than one: some layers have a kernel of their own for a single row


@dataclass
class LayerRecord:
    """The tensors that one layer received in one sync."""

    template: dict[str, nn.Parameter]  # the parameters before any packing, on the meta device or live
    loaders: dict[str, Callable[..., Any]]  # parameter name -> the layer's own weight loader, without wrappers
    # To rebuild the layer: (parameter name, bound arguments) of each loader call, in order, with copied tensors.
    calls: list[tuple[str, inspect.BoundArguments]] = field(default_factory=list)
    # Rebuilt already, by the same calls as the live parameters: parameter name -> parameter.
    loaded: dict[str, nn.Parameter] = field(default_factory=dict)
    failure: str | None = None  # why the layer could not be rebuilt

    @property
    def empty(self) -> bool:
        """Whether nothing was sent to the layer."""
        return not (self.calls or self.loaded or self.failure)


class NotVerifiableError(Exception):
    """A layer cannot be compared with a rebuilt layer; the message gives the reason."""


def layers_with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that hold parameters directly, by name."""
    return {name: layer for name, layer in model.named_modules() if [*layer.parameters(recurse=False)]}


def shared_parameter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) of the layers with a parameter that another layer holds as well (tied weights)."""
    layers = layers_with_parameters(model)
    holders = Counter(id(parameter) for layer in layers.values() for parameter in layer.parameters(recurse=False))
    for name, layer in layers.items():
        if any(holders[id(parameter)] > 1 for parameter in layer.parameters(recurse=False)):
            yield name, layer


@torch.no_grad()
def find_damage(layer: nn.Module, record: LayerRecord, repack: bool, model_dtype: torch.dtype) -> str | None:
    """Return proof that a layer of the rollout does not compute with the sent weights, or None.

    All parameters are compared bit for bit with those of a rebuilt layer. If the live layer computes with a packed copy
    (`repack`: it was packed after loading), the outputs on a fixed probe are compared too. If no reference can be built
    or compared, `NotVerifiableError` is raised: an unknown layout is no damage.
    """
    if record.failure is not None:
        raise NotVerifiableError(record.failure)
    try:
        reference = _rebuild(layer, record, repack, model_dtype)
    except Exception as error:
        raise NotVerifiableError(not_built(error)) from error
    held, fresh = ({k: p for k, p in one._parameters.items() if p is not None} for one in (layer, reference))
    if unlike := sorted(held.keys() ^ fresh.keys()):  # packed in another way, or not at all
        raise NotVerifiableError(f"only one of the live layer and a rebuilt layer has {', '.join(unlike)}")
    packed_away = hasattr(reference, "cpu_linear")
    for name, expected in fresh.items():
        found = held[name]
        if not expected.numel() and not found.numel():
            # The kernel has its own copy. The empty rest has torch's default dtype of the time when it was made.
            packed_away |= name in record.template and record.template[name].numel() > 0
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            raise NotVerifiableError(f"{name} is {_described(found)}, and {_described(expected)} if built afresh")
        elif unequal := int((bit_view(found) != bit_view(expected)).sum()):
            return f"{name}: {unequal} of {expected.numel()} elements are not those that were sent"
    if packed_away and not _same_outputs(layer, reference, record):
        return "its kernel computes with a packed copy of weights other than those that were sent"
    return None


def not_built(error: Exception) -> str:
    """Return why a layer cannot be rebuilt and so is not verified."""
    return f"it cannot be rebuilt for comparison ({type(error).__name__}: {error})"


def fresh_parameter(template: nn.Parameter, device: torch.device) -> Any:
    """Return a parameter for vLLM's loaders, with a template's layout, class and attributes, but not its values."""
    # empty_like would take a slow path, written in Python, where the template is on the meta device.
    fresh: Any = torch.empty_strided(template.size(), template.stride(), dtype=template.dtype, device=device)
    fresh.__class__ = template.__class__
    fresh.__dict__ = template.__dict__.copy()
    return fresh


def pack(layer: nn.Module) -> None:
    """Run the layer's own packing, as vLLM does after the first load."""
    method: Any = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)


def forget_expert_kernel(layer: nn.Module) -> None:
    """Make vLLM pack an expert layer at its next load, as at the first load, when vLLM builds the CPU kernel.

    Otherwise vLLM would read the loaded weights as packed weights, and the experts would compute with permuted ones.
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
    """Return a shallow copy of a layer with new parameters that hold the sent weights; everything else is shared."""
    reference: Any = copy.copy(layer)
    reference._parameters = {**layer._parameters, **record.loaded}
    for name in {name for name, _ in record.calls}:
        live: Any = layer._parameters[name]
        reference._parameters[name] = fresh_parameter(record.template[name], live.device)
    for name, arguments in record.calls:
        arguments.arguments["param"] = reference._parameters[name]
        record.loaders[name](*arguments.args, **arguments.kwargs)
    if repack:
        if hasattr(reference, "quant_method"):  # a copy: the live layer keeps its kernel
            object.__setattr__(reference, "quant_method", copy.copy(reference.quant_method))
        forget_expert_kernel(reference)
        with default_dtype(model_dtype):
            pack(reference)
    return reference


def _same_outputs(layer: Any, reference: Any, record: LayerRecord) -> bool:
    """Return whether two layers with packed weights give the same outputs for a fixed random input, bit for bit."""
    weight = record.template.get("weight")
    if weight is None or weight.dim() != 2 or not hasattr(getattr(layer, "quant_method", None), "apply"):
        raise NotVerifiableError("its kernel keeps a packed copy of the weights, and this guard cannot run that kernel")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, weight.shape[-1], generator=generator).to(weight.dtype)
    live, expected = (bit_view(one.quant_method.apply(one, probe, bias=None)) for one in (layer, reference))
    if torch.equal(live, expected):
        return True
    if not torch.equal(live, bit_view(layer.quant_method.apply(layer, probe, bias=None))):
        raise NotVerifiableError("its kernel gives a different result at each call")
    return False


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def not_held(
    sent: Mapping[str, Tensor], held: Iterable[tuple[str, Tensor]], dtype: torch.dtype, scaling: float
) -> list[str]:
    """Return the sorted names of an adapter's tensors that are not, bit for bit, in the buffers of their layer.

    `sent` are A and B under PEFT's names, `held` the tensors that the rollout's layers use, under names that end in
    `.lora_A` or `.lora_B`. The rollout has rounded both to `dtype`, and then multiplied B by `scaling`. A layer's
    place is its name from `layers.<number>` on, because the names differ before it. If the rollout does not have the
    place of a tensor, the tensor may be in any buffer.
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
