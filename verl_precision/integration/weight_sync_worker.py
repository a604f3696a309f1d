"""verl's vLLM worker extension, with the end of every weight sync verified.

Chosen by the presets: `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`. On a CPU it also makes
loading possible at all (`platforms.vllm_cpu`).

Five questions are asked after each sync, and a "no" stops the run with an error that names the tensor:

1. Did everything the trainer sent arrive bit for bit? (where the trainer closes its stream with a manifest)
2. Did it come in a dtype that holds what the rollout can? BF16 weights in an FP16 rollout bring BF16's gap back.
3. Did vLLM find a place for every parameter of its model?
4. Does each chosen layer compute what the weights it was sent say? (all layers of a small model; a window that moves
   through a large one)
5. Is the LoRA adapter loaded that this sync carried?

LoRA adapter syncs and quantised rollouts leave out 3 and 4: vLLM keeps adapters apart from the layers, and stores
quantised weights in another form. What could not be verified is counted and reported, never called a failed sync; the
canary (`weight_sync.canary`) covers it from the other side.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout import utils as verl_vllm
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_precision.errors import WeightSyncError
from verl_precision.integration.cpu.vllm_reload import layerwise_reload
from verl_precision.integration.load_recorder import choose_layers, comparable, record_loads
from verl_precision.weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorDigest,
    decode,
    differences,
    digest,
    rounded_on_the_way,
)
from verl_precision.weight_sync.report import SyncReport, write_report
from verl_precision.weight_sync.verify import LayerRecord, examine, shared_parameter_layers

logger = logging.getLogger("verl_precision.weight_sync")

_CAUSES = (
    "The rollout would sample from another policy than the one being trained. Usual causes: a layer that keeps a "
    "repacked copy of an old weight (tied embeddings), a parameter name the loader does not know, a transfer buffer "
    "reused before it was read, a dtype cast on the way. Set VERL_LOGGING_LEVEL=DEBUG for vLLM's loader messages; "
    "report the tensor names with the versions shown by `verl-precision check`."
)
# Lines of an error message; the log has them all.
_SHOWN = 8


@dataclass
class _Sync:
    """What is known of the sync under way."""

    on_cpu: bool
    manifest: Manifest | None = None
    received: dict[str, TensorDigest] = field(default_factory=dict)
    loaded: set[str] | None = field(default_factory=set)
    failure: Exception | None = None
    verified: int = 0
    unverified: int = 0
    seconds: float = 0.0


class VerifiedWeightSyncExtension(vLLMColocateWorkerExtension):
    """verl's worker extension that verifies each weight sync; see the module's docstring."""

    _sync: _Sync | None = None
    _sync_index = 0

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive and load weights as verl does, then verify.

        Args:
            peft_config: LoRA settings, or None.
            base_sync_done: with `peft_config`: whether this sync carries the adapter alone.
            use_shm: whether buckets come through shared memory.

        Raises:
            WeightSyncError: when the rollout's weights are not the trainer's.
        """
        self._sync = sync = _Sync(on_cpu=self.device is not None and self.device.type == "cpu")

        def receive() -> None:
            super(VerifiedWeightSyncExtension, self).update_weights_from_ipc(
                peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm
            )
            if sync.failure is not None:
                raise sync.failure

        adapter_only = bool(peft_config and base_sync_done)
        try:
            if adapter_only or self._is_quantised():
                receive()
                problems = self._arrival_problems(sync)
                if adapter_only:
                    problems += self._adapter_problems(sync)
                else:
                    sync.unverified = sum(1 for _ in _layers_with_parameters(self.model_runner.model))
            else:
                model: Any = self.model_runner.model
                expected = {name for name, _ in model.named_parameters()}
                with ExitStack() as stack:
                    try:
                        records = stack.enter_context(self._loading(model))
                        stack.enter_context(_collect_loaded(model, sync))
                    except Exception as error:  # raised by receive(), once the sender has been answered
                        sync.failure = error.with_traceback(None)
                    receive()
                problems = self._arrival_problems(sync) + _coverage_problems(expected, sync.loaded)
                problems += self._layer_problems(model, records, sync)
        finally:
            self._sync = None
        if problems:
            for problem in problems:
                logger.error("weight sync %d: %s", self._sync_index, problem)
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            shown = "; ".join(problems[:_SHOWN]) + more
            raise WeightSyncError(f"Weight sync {self._sync_index} did not take: {shown}. {_CAUSES}")
        if sync.manifest is not None and sync.manifest.reply_to is not None:
            write_report(sync.manifest.reply_to, SyncReport(sync.verified, sync.unverified, sync.seconds))
        self._sync_index += 1

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict, base_sync_done: bool) -> None:
        """Load one bucket; an error waits until the sender has been answered, or it would wait for ever."""
        sync = self._sync
        if sync is None:  # a path of verl's that does not go through update_weights_from_ipc
            return super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
        if sync.failure is not None:
            return None
        try:
            tensors = []
            for name, tensor in weights:
                if name == MANIFEST_NAME:
                    sync.manifest = decode(tensor)
                else:
                    # The layer-wise reload reads tensors after this bucket's memory has been reused.
                    tensors.append((name, tensor.clone() if sync.on_cpu else tensor))
            with _timed(sync):  # what is digested is what is loaded: damage on the way here shows
                sync.received.update((name, digest(tensor)) for name, tensor in tensors)
            super()._update_weights(tensors, peft_config=peft_config, base_sync_done=base_sync_done)
        except Exception as error:  # kept, and raised at the end of update_weights_from_ipc
            # As text, and kept without its frames: they hold views of the transfer buffer, which could then not be
            # released, and the sender would wait for ever.
            logger.error("weight sync %d: loading failed\n%s", self._sync_index, traceback.format_exc())
            sync.failure = error.with_traceback(None)
        return None

    def _iter_all_models_with_config(self):
        """Yield nothing while the layer-wise reload is under way: it post-processes the layers itself."""
        if self._sync is not None and self._sync.on_cpu:
            return
        yield from super()._iter_all_models_with_config()

    def _loading(self, model: torch.nn.Module) -> AbstractContextManager[dict[str, LayerRecord]]:
        assert self._sync is not None
        if self._sync.on_cpu:
            layers = choose_layers(model, self._sync_index, accept=lambda layer: True)
            return layerwise_reload(model, self.model_runner.vllm_config.model_config, layers)
        return record_loads(model, choose_layers(model, self._sync_index, accept=comparable))

    def _arrival_problems(self, sync: _Sync) -> list[str]:
        dtype = self.model_runner.vllm_config.model_config.dtype
        found = [] if sync.manifest is None else differences(sync.manifest.tensors, sync.received)
        if self._sync_index == 0:
            kinds = Counter(digest.dtype.removeprefix("torch.") for digest in sync.received.values())
            came = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
            logger.info("first weight sync: %s arrived; the rollout holds %s", came, str(dtype).removeprefix("torch."))
        return found + rounded_on_the_way(sync.received, dtype)

    def _adapter_problems(self, sync: _Sync) -> list[str]:
        """Ask vLLM whether it holds the adapter; without it verl serves the base model, without a word."""
        sync.unverified = len({name.partition(".lora_")[0] for name in sync.received})
        if verl_vllm.VLLM_LORA_INT_ID in self.list_loras():
            return []
        return [f"LoRA adapter {verl_vllm.VLLM_LORA_INT_ID}: vLLM does not hold it; the base model would be sampled"]

    def _layer_problems(self, model: torch.nn.Module, records: dict[str, LayerRecord], sync: _Sync) -> list[str]:
        problems = []
        tied = {name for name, _ in shared_parameter_layers(model)} if sync.on_cpu else set()
        dtype = self.model_runner.vllm_config.model_config.dtype
        with _timed(sync):
            for name, layer in _layers_with_parameters(model):
                record = records.get(name)
                if record is None:
                    sync.unverified += not sync.on_cpu and not comparable(layer)
                    continue
                if not (record.calls or name in tied):
                    continue  # nothing was sent to it; whether something should have been is asked by name
                verdict = examine(layer, record, repack=sync.on_cpu, model_dtype=dtype)
                sync.verified += verdict.verified
                sync.unverified += verdict.unknown is not None
                if verdict.damage is not None:
                    problems.append(f"{name}: {verdict.damage}")
                elif verdict.unknown is not None:
                    log = logger.warning if self._sync_index == 0 else logger.debug
                    log("weight sync %d: %s is not verified: %s", self._sync_index, name, verdict.unknown)
        return problems

    def _is_quantised(self) -> bool:
        """Tell whether the rollout stores other weights than it is sent; then arrival is all that can be compared."""
        if not (self._is_qat_model or self._is_modelopt_qat or is_quantized_model(self.model_runner.vllm_config)):
            return False
        if self._sync_index == 0:
            logger.warning("the rollout is quantised: weight syncs are checked for arrival only, not layer by layer")
        return True


@contextmanager
def _collect_loaded(model: Any, sync: _Sync):
    """Collect the names `model.load_weights` returns; a model that returns None cannot be checked for coverage."""
    load_weights = model.load_weights

    def collecting(weights: Any) -> Any:
        names = load_weights(weights)
        sync.loaded = None if names is None or sync.loaded is None else sync.loaded | set(names)
        return names

    model.load_weights = collecting
    try:
        yield
    finally:
        del model.load_weights


def _coverage_problems(expected: set[str], loaded: set[str] | None) -> list[str]:
    if loaded is None:
        return []
    return [
        f"{name}: no tensor of the sync was loaded into it" for name in sorted(expected) if not _is_in(name, loaded)
    ]


def _is_in(name: str, loaded: set[str]) -> bool:
    """Tell whether `a.b.c.weight` was loaded under its own name or an ancestor's (`a.b.weight`).

    vLLM's loaders name expert weights by the layer that loads them, which is not always the one that holds them.
    """
    parents = name.split(".")
    leaf = parents.pop()
    return any(".".join([*parents[:depth], leaf]) in loaded for depth in range(len(parents), -1, -1))


def _layers_with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield name, layer


@contextmanager
def _timed(sync: _Sync) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        sync.seconds += time.perf_counter() - start
