"""A weight sync under way: the layers that it verifies, loaded twice; what has arrived, and what has gone wrong."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import StreamDigest, TensorDigest, integers
from verl_precision.weight_sync.report import SyncReport
from verl_precision.weight_sync.verify import LayerRecord, fresh_parameter, layers_with_parameters, not_built

# Methods, by class name, that change no parameter after loading on an accelerator. Other layers are only counted.
_COMPARABLE_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"}
_EXPERTS_METHOD = "UnquantizedFusedMoEMethod"
# Kernels of this method that use expert weights as loaded: vLLM's choice on H100. Other kernels shuffle the weights.
_COMPARABLE_EXPERT_KERNELS = {"TRITON", "BATCHED_TRITON"}

# Parameter elements verified in one sync beside the first, the last and a larger layer. The guard needs
# b * (E + 2^26 + (N if N > 2^26 else 0)) + M bytes: b bytes an element, E elements in this rank's first and last layer,
# N in the largest layer between them, M in the largest parameter (a byte each). docs/scales.md has examples.
ELEMENTS_PER_SYNC = 1 << 26


def comparable(layer: nn.Module) -> bool:
    """Return whether, on an accelerator, a layer's parameters stay as its loaders wrote them."""
    method: Any = getattr(layer, "quant_method", None)
    if type(method).__name__ != _EXPERTS_METHOD:
        return type(method).__name__ in _COMPARABLE_METHODS
    padded = method.moe.hidden_dim != method.moe.hidden_dim_unpadded  # no loader writes the padding
    return method.unquantized_backend.name in _COMPARABLE_EXPERT_KERNELS and not padded


def choose_layers(
    model: nn.Module, sync_index: int, accept: Callable[[nn.Module], bool], budget: int = ELEMENTS_PER_SYNC
) -> set[str]:
    """Choose the layers to verify in this sync: the first, the last, and a window that moves on with every sync.

    `budget` is the largest number of parameter elements in the window; one larger layer is verified beside it.
    """
    layers = {name: layer for name, layer in layers_with_parameters(model).items() if accept(layer)}
    sizes = {name: sum(p.numel() for p in layer.parameters(recurse=False)) for name, layer in layers.items()}
    names = list(sizes)
    chosen = {*names[:1], *names[-1:]}
    # Each sync starts at another layer; the golden ratio spreads the starts evenly over the model.
    start = int(sync_index * 0.618033988749895 * len(names)) % max(1, len(names))
    spent, larger = 0, False
    for name in names[start:] + names[:start]:
        if sizes[name] > budget and name not in chosen and not larger:
            larger = True
        elif name not in chosen and spent + sizes[name] <= budget:
            spent += sizes[name]
        else:
            continue
        chosen.add(name)
    return chosen


@contextlib.contextmanager
def record_loads(model: nn.Module, layers: set[str]) -> Iterator[dict[str, LayerRecord]]:
    """Inside the block, load the named layers' parameters twice: the live ones, and others to compare them with.

    Yields layer name -> what the layer was sent, filled while loading: transfer buffers are reused.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    records: dict[str, LayerRecord] = {}
    # Parameter -> the records of its layers, and its name in each; tied layers share a parameter.
    holders: dict[Any, list[tuple[str, LayerRecord]]] = defaultdict(list)
    for name in layers:
        template = dict(model.get_submodule(name).named_parameters(recurse=False))
        records[name] = LayerRecord(template, loaders={})
        for key, parameter in template.items():
            holders[parameter].append((key, records[name]))
    with contextlib.ExitStack() as stack:
        for parameter, held_by in holders.items():
            own = getattr(parameter, "weight_loader", None)
            parameter.weight_loader = _loading_twice(parameter, own or default_weight_loader, held_by)
            undo: Any = (setattr, parameter, "weight_loader", own) if own else (delattr, parameter, "weight_loader")
            stack.callback(*undo)
        yield records


def _loading_twice(live: Any, loader: Callable[..., Any], holders: list[tuple[str, LayerRecord]]) -> Callable[..., Any]:
    """Return a loader that loads the live parameter, then another one for the comparison in all its layers."""
    fresh: Any = None

    def load(*args: Any, **kwargs: Any) -> Any:
        nonlocal fresh
        result = loader(*args, **kwargs)
        try:
            if not any(argument is live for argument in (*args, *kwargs.values())):
                raise TypeError("its weight loader did not receive the parameter")
            if fresh is None:
                fresh = _unlike(live)
                fresh.weight_loader = loader
            again = [fresh if argument is live else argument for argument in args]
            loader(*again, **{key: fresh if value is live else value for key, value in kwargs.items()})
            for name, record in holders:
                record.loaded[name] = fresh
        except Exception as error:  # the live one is loaded: the sync goes on, without verifying this layer
            for _, record in holders:
                record.failure = not_built(error)
        return result

    return load


def _unlike(live: Any) -> Any:
    """Return a fresh parameter whose elements all differ from the live one's, so that unwritten elements are found."""
    fresh = fresh_parameter(live, live.device)
    bits = integers(live.dtype)
    torch.bitwise_not(live.data.view(bits), out=fresh.data.view(bits))
    return fresh


@dataclass
class Sync:
    """The state of one sync: tensors received, parameters loaded, problems found."""

    on_cpu: bool
    peft_config: dict[str, Any] | None  # of a stream that brings a LoRA adapter, and no base weights
    sent: dict[str, TensorDigest] | None = None  # None: the trainer sends no manifest
    reply_to: str | None = None
    received: dict[str, torch.dtype] = field(default_factory=dict)
    digests: StreamDigest | None = None  # of the received tensors; None: the trainer announces no manifest
    parameters: set[str] | None = None  # the model's; None: its layers are not verified
    records: dict[str, LayerRecord] = field(default_factory=dict)  # of the layers to verify
    loading: str = ""  # the tensors that the model got last
    loaded: set[str] | None = field(default_factory=set)  # None: the model does not report what it has loaded
    adapter: dict[str, Tensor] = field(default_factory=dict)  # the tensors of a LoRA adapter
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)  # on CPU, to be set when the reload has ended
    problems: list[str] = field(default_factory=list)
    failure: Exception | None = None  # raised after the reply to the sender, which would otherwise wait forever
    report: SyncReport = field(default_factory=SyncReport)

    def take_bucket(self, weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors of a bucket that must be loaded; record them, and read the manifest."""
        tensors = []
        for name, tensor in weights:
            if name == manifest.ANNOUNCEMENT_NAME:
                self.digests = StreamDigest()
            elif name == manifest.MANIFEST_NAME:
                self.sent, self.reply_to = manifest.read_manifest(tensor)
            else:
                # The layer-wise reload reads tensors after this bucket's memory has been reused.
                tensors.append((name, tensor.clone() if self.on_cpu else tensor))
        start = time.perf_counter()
        for name, tensor in tensors:
            self.received[name] = tensor.dtype
            if self.digests is not None:
                self.digests.add(name, tensor)
        self.loading = f"a tensor from {tensors[0][0]} to {tensors[-1][0]}" if tensors else self.loading
        self.adapter = dict(tensors) if self.peft_config is not None else self.adapter
        self.report.seconds += time.perf_counter() - start
        return tensors

    def collect_loaded(self, model: Any) -> None:
        """Collect the names that `model.load_weights` returns, until the attribute is deleted."""
        load_weights = model.load_weights

        def progress_noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self.loading = name
                yield name, tensor

        def collecting(weights: Any) -> Any:
            names = load_weights(progress_noted(weights))
            self.loaded = None if names is None or self.loaded is None else self.loaded | set(names)
            return names

        model.load_weights = collecting

    def coverage_problems(self) -> list[str]:
        """Return a problem for each parameter that was not loaded, by its own name or (experts) by a parent layer's."""
        parameters = self.parameters or set()

        def arrived(name: str) -> bool:
            *parents, leaf = name.split(".")
            return any(".".join([*parents[:depth], leaf]) in names for depth in range(len(parents) + 1))

        names = parameters if self.loaded is None else self.loaded
        return [f"{name}: no tensor of the sync was loaded into it" for name in sorted(parameters) if not arrived(name)]
