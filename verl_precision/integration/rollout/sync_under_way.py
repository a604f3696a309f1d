"""The state of a running weight sync: tensors received, parameters loaded, problems found."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_precision.weight_sync import manifest
from verl_precision.weight_sync.manifest import StreamDigest, TensorDigest
from verl_precision.weight_sync.report import SyncReport
from verl_precision.weight_sync.verify import LayerRecord


@dataclass
class Sync:
    """One sync; see the module's docstring."""

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
