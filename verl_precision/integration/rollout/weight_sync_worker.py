"""verl's vLLM worker extension. It verifies each weight sync at its end, and stops the run if a fault is proven.

The presets choose it: `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`. docs/weight_sync.md lists
its checks, and the faults that only the canary can find.
"""

import logging
import time
import traceback
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor
from verl.utils.device import get_torch_device
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from verl.workers.rollout.vllm_rollout import utils as verl_vllm
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_precision.base.errors import WeightSyncError
from verl_precision.base.loggers import weight_sync as logger
from verl_precision.integration.cpu.vllm_on_cpu import bind_again, layerwise_reload
from verl_precision.integration.rollout.draft import Draft, draft_of
from verl_precision.integration.rollout.load_recorder import Sync, choose_layers, comparable, record_loads
from verl_precision.integration.rollout.weight_socket import own_path
from verl_precision.weight_sync import manifest, verify
from verl_precision.weight_sync.verify import LayerRecord, NotVerifiableError, not_held

SYNC_HELP = (
    "The rollout would sample from a policy that is not the trainer's. Usual causes: a layer that keeps a "
    "repacked copy of an old weight (tied embeddings), a parameter name the loader does not know, a transfer buffer "
    "reused before it was read, a dtype cast on the way. Set VERL_LOGGING_LEVEL=DEBUG for vLLM's loader messages; "
    "report the tensor names with the versions shown by `verl-precision check`."
)
_SHOWN = 8  # problems in an error message; the log has them all


class VerifiedWeightSyncExtension(vLLMColocateWorkerExtension):
    """verl's worker extension that verifies each weight sync; see the module's docstring."""

    _sync: Sync | None = None
    _draft: Draft | None = None
    _sync_index = 0
    _without_adapter = 0  # streams of base weights since the latest adapter
    _encoded: "dict[str, weakref.ref[Tensor]]" = {}  # outputs of encoders that were cached when the latest sync ended

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive, load (as verl does) and verify weights; with LoRA and `base_sync_done` they are the adapter's."""
        on_cpu = self.device is not None and self.device.type == "cpu"
        self._sync = sync = Sync(on_cpu, (peft_config or None) if base_sync_done else None)
        try:
            with ExitStack() as until_loaded:
                self._look_at_the_model(sync, until_loaded)
                super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
                if sync.failure is not None:
                    raise sync.failure
            if sync.buffers:
                named_buffers = dict(self.model_runner.model.named_buffers())
                super()._apply_buffer_updates_all_models(sync.buffers, named_buffers)
            self._verify(sync)
        finally:
            self._sync = None
            self._encoded = {key: weakref.ref(output) for key, output in self._encoder_outputs().items()}
            sync.records.clear()
            get_torch_device().empty_cache()  # verl emptied it before the records were freed; the KV cache is next
        self._raise_problems(sync.problems)
        if sync.reply_to is not None and not sync.report.write(sync.reply_to) and self._sync_index == 0:
            logger.warning("verified, but not in the trainer's metrics, since it has another host: %s", sync.report)
        if sync.on_cpu:
            bind_again(self.model_runner)
        self._sync_index += 1

    def _look_at_the_model(self, sync: Sync, until_loaded: ExitStack) -> None:
        """Look for old encoder outputs, note the model's parameters, and start to record what is loaded."""
        model: Any = self.model_runner.model
        self._without_adapter = self._without_adapter + 1 if sync.peft_config is None else 0
        try:
            self._draft = self._draft if self._sync_index else draft_of(self.model_runner)
            sync.problems += self._old_encoder_outputs() if self._sync_index else []
            if sync.peft_config is None and not self._is_quantised():
                sync.parameters = {name for name, _ in model.named_parameters()}
                sync.records = until_loaded.enter_context(self._recording(model, sync))
                sync.collect_loaded(model)
                until_loaded.callback(delattr, model, "load_weights")
        except Exception as error:
            sync.failure = self._failure("looking at the model", error)

    def _verify(self, sync: Sync) -> None:
        """Add the problems of a sync that has ended."""
        model: Any = self.model_runner.model
        sync.problems += self._arrival_problems(sync) + self._delivery_problems()
        if self._draft is not None:
            start = time.perf_counter()
            self._draft.add_to(sync.report)
            sync.report.seconds += time.perf_counter() - start
        if sync.peft_config is not None:
            sync.problems += self._adapter_problems(sync, sync.peft_config)
        elif sync.parameters is not None:
            sync.problems += sync.coverage_problems() + self._layer_problems(model, sync)
        else:
            sync.report.unverified_layers = len(verify.layers_with_parameters(model))

    def _raise_problems(self, problems: list[str]) -> None:
        for problem in problems:
            logger.error("weight sync %d: %s", self._sync_index, problem)
        if problems:
            shown = "; ".join(problems[:_SHOWN] + [f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN))
            raise WeightSyncError(f"Weight sync {self._sync_index} did not take: {shown}. {SYNC_HELP}")

    def _update_weights(self, weights: list[tuple[str, Tensor]], peft_config: dict, base_sync_done: bool) -> None:
        """Load one bucket; keep an error in `sync.failure`."""
        sync = self._sync
        if sync is None:  # the call does not come from update_weights_from_ipc
            return super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
        if sync.failure is not None:
            return None
        try:
            tensors = sync.take_bucket(weights)
            super()._update_weights(tensors, peft_config=peft_config, base_sync_done=base_sync_done)
        except Exception as error:
            sync.failure = self._failure(sync.loading, error)

    def _failure(self, doing: str, error: Exception) -> WeightSyncError:
        """Return an error without its frames: they hold views of the transfer buffer, for which the sender waits."""
        logger.error("weight sync %d: %s failed\n%s", self._sync_index, doing, traceback.format_exc())
        words = f"Weight sync {self._sync_index} did not take: {doing}: {error!r}. {SYNC_HELP}"
        return error.with_traceback(None) if isinstance(error, WeightSyncError) else WeightSyncError(words)

    def _apply_buffer_updates_all_models(self, buffer_updates: list, main_named_buffers: dict) -> int:
        """Set buffers as verl does; on CPU later, since a layer-wise reload would put the old values back."""
        if self._sync is None or not self._sync.on_cpu:
            return super()._apply_buffer_updates_all_models(buffer_updates, main_named_buffers)
        self._sync.buffers += buffer_updates
        return len(buffer_updates)

    def _get_zmq_handle(self) -> str:
        return own_path(super()._get_zmq_handle())

    def _iter_all_models_with_config(self):
        """Yield nothing during a layer-wise reload, which packs the layers itself."""
        if self._sync is None or not self._sync.on_cpu:
            yield from super()._iter_all_models_with_config()

    def _recording(self, model: Any, sync: Sync) -> AbstractContextManager[dict[str, LayerRecord]]:
        layers = choose_layers(model, self._sync_index, (lambda layer: True) if sync.on_cpu else comparable)
        config = self.model_runner.vllm_config.model_config
        return layerwise_reload(model, config, layers) if sync.on_cpu else record_loads(model, layers)

    def _arrival_problems(self, sync: Sync) -> list[str]:
        dtype = self.model_runner.vllm_config.model_config.dtype
        start, lost = time.perf_counter(), []
        if sync.digests is not None and sync.sent is None:
            lost = ["the manifest: announced by the trainer, but not received"]
        elif sync.sent is not None:
            received = {} if sync.digests is None else sync.digests.fetch()
            lost = manifest.differences(sync.sent, received)
            sync.report.weights_digest = manifest.digest_of_all(received)
        sync.report.seconds += time.perf_counter() - start
        return lost + manifest.rounded_on_the_way(sync.received, dtype)

    def _encoder_outputs(self) -> dict[str, Tensor]:
        """Return vLLM's cache of encoder outputs (images, audio); newer runners keep the cache in an object."""
        cache = getattr(self.model_runner, "encoder_cache", None)
        return getattr(cache, "encoder_outputs", cache) or {}

    def _old_encoder_outputs(self) -> list[str]:
        """Return the problems of encoder outputs from before the latest sync that are still in use (verl#6523)."""
        then = {key: output() for key, output in self._encoded.items()}
        old = [key for key, one in self._encoder_outputs().items() if then.get(key) is one]
        came = f"weight sync {self._sync_index - 1}"
        return [f"encoder output {key}: from before {came}, used after it: caches were not reset" for key in old]

    def _delivery_problems(self) -> list[str]:
        """Return a problem if vLLM is to serve an adapter, but receives none (verl#7495)."""
        if self.model_runner.vllm_config.lora_config is None or self._without_adapter < 2:
            return []
        return [
            f"LoRA adapter {verl_vllm.VLLM_LORA_INT_ID}: {self._without_adapter} weight streams brought base weights "
            "and none an adapter; the initial policy would be sampled. verl sends adapters with "
            "rollout.checkpoint_engine.backend=naive only; otherwise set model.lora.merge=True"
        ]

    def _adapter_problems(self, sync: Sync, peft_config: dict) -> list[str]:
        """Return a problem if vLLM does not compute with the adapter: it would silently serve the base model."""
        sync.report.unverified_layers = layers = len({name.partition(".lora_")[0] for name in sync.received})
        number = verl_vllm.VLLM_LORA_INT_ID
        if number not in self.list_loras():
            return [f"LoRA adapter {number}: vLLM does not hold it; the base model would be sampled"]
        manager = self.model_runner.model.lora_manager
        adapter, rank = manager.get_adapter(number), peft_config["r"]
        using = {name: layer for name, layer in manager.modules.items() if adapter.get_lora(name) is not None}
        if number not in manager.lora_index_to_id or not all(_whole(using[n], adapter.get_lora(n)) for n in using):
            return []
        slot, held = manager.lora_index_to_id.index(number), []
        for name, layer in using.items():
            parts = manager.packed_modules.get(name, [name])  # q_proj, k_proj and v_proj of qkv_proj
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                held += [(f"{part}.lora_A", a[slot, 0, :rank]), (f"{part}.lora_B", b[slot, 0, :, :rank])]
        scaling = peft_config["lora_alpha"] / rank ** (0.5 if peft_config.get("use_rslora") else 1)
        missing = not_held(sync.adapter, held, manager.lora_config.lora_dtype, scaling)
        sync.report.verified_layers, sync.report.unverified_layers = (0 if missing else layers), 0
        return [f"{name}: no layer of vLLM computes with it, of {len(using)} that use an adapter" for name in missing]

    def _layer_problems(self, model: Any, sync: Sync) -> list[str]:
        start, problems = time.perf_counter(), []
        tied = {name for name, _ in verify.shared_parameter_layers(model)} if sync.on_cpu else set()
        dtype = self.model_runner.vllm_config.model_config.dtype
        for name, layer in verify.layers_with_parameters(model).items():
            record = sync.records.get(name)
            if record is None:
                sync.report.unverified_layers += not sync.on_cpu and not comparable(layer)
                continue
            if record.empty and name not in tied:  # `coverage_problems` checks what was due, by name
                sync.report.unverified_layers += 1
                continue
            try:
                damage = verify.find_damage(layer, record, repack=sync.on_cpu, model_dtype=dtype)
            except NotVerifiableError as reason:
                sync.report.unverified_layers += 1
                level = logging.WARNING if self._sync_index == 0 else logging.DEBUG
                logger.log(level, "weight sync %d: %s is not verified: %s", self._sync_index, name, reason)
                continue
            sync.report.verified_layers += damage is None
            problems += [] if damage is None else [f"{name}: {damage}"]
        sync.report.seconds += time.perf_counter() - start
        return problems

    def _is_quantised(self) -> bool:
        """Return whether the rollout stores other weights than it is sent, so that only arrival can be checked."""
        if not (self._is_qat_model or self._is_modelopt_qat or is_quantized_model(self.model_runner.vllm_config)):
            return False
        if self._sync_index == 0:
            logger.warning("the rollout is quantised: weight syncs are checked for arrival only, not layer by layer")
        return True


def _whole(layer: Any, weights: Any) -> bool:
    """Return whether vLLM keeps a layer's adapter as it was sent: no experts, not split over ranks or into slices."""
    tensors = len(weights.lora_a) if isinstance(weights.lora_a, list) else 1
    return isinstance(layer.lora_a_stacked, tuple) and layer.tp_size == 1 and tensors == layer.n_slices
