"""verl's FSDP engines with loss scaling, FP32 log-probs, verified dtypes, a shadow, router replay and exact weights.

`PrecisionFSDPEngine` overrides each method of verl's once, and the method shows the order of its phases. The phases
themselves stand in the modules of their subjects. verl builds and drives our scaler as it does its own.
An engine whose config is not `PrecisionFSDPConfig` takes verl's path.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_precision.base.dtypes import long, torch_dtype
from verl_precision.base.errors import ConfigurationError, LossScaleError
from verl_precision.engine.forward_dtypes import ForwardDtypes, compute_head_in_fp32
from verl_precision.engine.loss_scaling import LossScaler, diagnosis, load_scaler, save_scaler
from verl_precision.engine.shadow import ROUNDED_TO, ShadowModel, build_shadow, loss_of_shadow, rounded_weights
from verl_precision.engine.step_report import StepReport
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.measurement import shadow_known, updates_of
from verl_precision.integration.engine.model_outputs import fp32_outputs
from verl_precision.integration.engine.registry import CPU, NVIDIA, register_engine
from verl_precision.integration.engine.router_replay import RouterReplay
from verl_precision.integration.engine.weight_export import (
    SentWeights,
    adapter_layers,
    merged_lora,
    served_lora,
    write_export_dtype,
)
from verl_precision.integration.ledger import wrap_once
from verl_precision.integration.trainer.checkpoints import adopt_earlier
from verl_precision.tools.actions.learning_rate import LOWER_RATE, ScaledLearningRate
from verl_precision.tools.arithmetic.trainer_model import round_once


class PrecisionFSDPEngine:
    """The mixin that comes before FSDPEngineWithLMHead or FSDPEngineWithValueHead, whose methods `super()` names."""

    engine_config: Any
    # With verl's own config too? On a CPU: `VerifiedWeightSyncExtension` alone can load again there, and it reads it.
    always_sends_manifest = False
    _dtypes: ForwardDtypes
    _shadow: ShadowModel | None = None
    _replay: RouterReplay | None = None
    _report: StepReport
    _sent: SentWeights | None = None
    _rate: ScaledLearningRate | None = None  # by the config, or while the alarm asks for it
    _rate_is_set = False
    sends_weights = True  # to a rollout
    adapter_layers: dict[str, Any]  # of LoRA, without weights: the actor's

    @property
    def _has_precision_config(self) -> bool:
        return isinstance(self.engine_config, PrecisionFSDPConfig)

    @property
    def _is_critic(self) -> bool:
        return isinstance(self, FSDPEngineWithValueHead)

    # Building: shadow, routers, actor; each before its model is sharded.

    def _build_fsdp_module(self, module):
        round_once(self, module)
        if not self._has_precision_config:
            return super()._build_fsdp_module(module)
        config = self.engine_config
        if not (config.forward_only or self._is_critic):
            if self.sends_weights:
                model = self.model_config
                self.adapter_layers = adapter_layers(module, bool(model.lora.get("merge")), model.target_modules)
            if config.shadow.enabled:
                # First: what verl's builder notes about the engine must be, in the end, the actor's.
                self._shadow = build_shadow(self, module, self._build_verified)
            if RouterReplay.is_asked(config):
                self._replay = RouterReplay(module, config)
            if config.learning_rate_ess_base is not None:
                self._rate, self._rate_is_set = ScaledLearningRate(config.learning_rate_ess_base), True
        return self._build_verified(module)

    def _build_verified(self, module):
        """Have verl shard a model whose forward records its dtypes, and put our scaler in the place of verl's."""
        self._report = StepReport()
        config = self.engine_config
        head = compute_head_in_fp32(module) if config.fp32_output_head and not self._is_critic else None
        # Before sharding: under FSDP1 the modules then have no matrix of their own any more.
        self._dtypes = ForwardDtypes(
            module,
            role="reference" if config.forward_only else "critic" if self._is_critic else "actor",
            expected=torch_dtype(config.compute_dtype),
            exempt=head,
        )
        with warnings.catch_warnings():  # verl's scaler, replaced below, says that it is off without CUDA
            warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available")
            module = super()._build_fsdp_module(module)
        if self.scaler is not None:
            self.scaler = None if config.forward_only else LossScaler(config.loss_scale, get_device_name())
        return module

    # Forward: shadow, router replay, canary, verl's step, verification.

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step; with `ratio_source=shadow`, every log-prob has the shadow's value.

        Without gradients the shadow alone runs. With gradients both run, and the loss gets log-probs that are the
        shadow's in value and the training forward's in gradient.
        """
        step = self._verified_step
        if self._replay is not None:
            step = functools.partial(self._replay.step, step)
        ratio_from_shadow = self._shadow is not None and self.engine_config.shadow.ratio_source == "shadow"
        if forward_only and ratio_from_shadow:
            with self._shadow.in_place_of_the_actor(self):
                return step(micro_batch, loss_function, True)
        if self._shadow is None or forward_only:
            return step(micro_batch, loss_function, forward_only)
        updates, shadow_log_probs = updates_of(self), None
        if ratio_from_shadow or (updates is not None and updates.need_shadow(self.engine_config.shadow)):
            with self._shadow.in_place_of_the_actor(self):
                shadow_log_probs = step(micro_batch, None, True)[1]["model_output"]["log_probs"]
        if ratio_from_shadow:
            loss_function = loss_of_shadow(loss_function, shadow_log_probs)
        with shadow_known(shadow_log_probs):
            return step(micro_batch, loss_function, forward_only)

    def _verified_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step, perhaps with weights rounded for the canary, then compare dtypes with the config."""
        if not self._has_precision_config:
            return super().forward_step(micro_batch, loss_function, forward_only)
        coarser = tu.get_non_tensor_data(data=micro_batch, key=ROUNDED_TO, default=None)
        with rounded_weights(self.module, torch_dtype(coarser)) if coarser else contextlib.nullcontext():
            result = super().forward_step(micro_batch, loss_function, forward_only)
        self._dtypes.check()
        return result

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Return log-probs and entropy in FP32, unless the config asks for verl's; a critic's values are verl's."""
        verls = functools.partial(
            super().prepare_model_outputs, output, output_args, micro_batch, logits_processor_func
        )
        if self._has_precision_config and self.engine_config.fp32_log_probs and not self._is_critic:
            return fp32_outputs(self, output, output_args, micro_batch, verls)
        return verls()

    # Update: verl's mini-batch, which `measurement.py` measures, then what scaler and weight sync have to report.

    def train_batch(self, data, loss_function):
        """Train on a mini-batch as verl does; at the last one of a step also report."""
        if self._has_precision_config and not self._rate_is_set:
            self._rate = ScaledLearningRate(1.0) if tu.get(data, key=LOWER_RATE, default=False) else None
        if self._rate is not None:
            loss_function = self._rate.watched(loss_function)
        outputs = super().train_batch(data, loss_function)
        if (self._has_precision_config or self._sent is not None) and self.is_mp_src_rank_with_outputs():
            if self._has_precision_config and self._report.last_skipped:
                # verl averages it over mini-batches: one inf would hide all others
                outputs["metrics"].pop("grad_norm")
            if tu.get(data, key="update_lr_scheduler", default=True):
                found = self._report.metrics(self.scaler) if self._has_precision_config else {}
                for part in (self._sent, self._rate):
                    found |= {} if part is None else part.take_metrics()
                # lists, as verl's own: it joins those of all ranks
                outputs["metrics"].update({key: [value] for key, value in found.items()})
        return outputs

    def optimizer_step(self):
        """Do verl's step with our scaler, and our rate; raise LossScaleError when the scale can fall no further."""
        with contextlib.nullcontext() if self._rate is None else self._rate.applied(self):
            grad_norm = super().optimizer_step()
        if self._shadow is not None:
            self._shadow.outdate()
        if self._has_precision_config:
            self._report.add(grad_norm, self.scaler)
            if self.scaler is not None and self.scaler.exhausted:
                raise LossScaleError(diagnosis(self.scaler, self.module.named_parameters()))
        return grad_norm

    def lr_scheduler_step(self):
        """Advance the schedule, unless every update since the last call was skipped."""
        if not self._has_precision_config or self._report.take_applied():
            return super().lr_scheduler_step()
        return self.lr_scheduler.get_last_lr()[0]

    # Weights: to the rollout, to a checkpoint and from one, to another device.

    def get_per_tensor_param(self, *args, **kwargs):
        """Return verl's weight stream, watched and perhaps rounded; if the receiver reads it, closed by a manifest."""
        if not (self._has_precision_config or self.always_sends_manifest):
            return super().get_per_tensor_param(*args, **kwargs)
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        if peft_config is not None and kwargs.get("base_sync_done") and self.engine_config.strategy == "fsdp":
            weights = served_lora(self)
        if self._sent is None:
            self._sent = SentWeights()
        return self._sent.prepared(weights, self), peft_config

    def _merged_lora_per_tensor_param(self, *args, **kwargs):
        if self._has_precision_config:
            return merged_lora(self)
        return super()._merged_lora_per_tensor_param(*args, **kwargs)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        """Save verl's checkpoint and, before the barrier that ends the call, scaler state and the export's dtype."""
        if self._has_precision_config and local_path is not None and torch.distributed.get_rank() == 0:  # who removes
            adopt_earlier(self.checkpoint_manager, local_path, max_ckpt_to_keep)
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        if local_path is None or not self._has_precision_config:
            return
        if isinstance(self.scaler, LossScaler) and self.checkpoint_manager.should_save_extra:
            save_scaler(self.scaler, local_path)
        if torch.distributed.get_rank() == 0:
            write_export_dtype(str(Path(local_path) / "huggingface"), long(self.engine_config.compute_dtype))
            if self.model_config.lora_rank and not self._is_critic:  # verl keeps rank and alpha alone
                adapter = getattr(self.module, "_fsdp_wrapped_module", self.module).peft_config["default"]
                adapter.save_pretrained(local_path)
        torch.distributed.barrier()

    def load_checkpoint(self, local_path, *args, **kwargs):
        """Load verl's checkpoint and the scaler's state; a checkpoint without it loads with a warning."""
        super().load_checkpoint(local_path, *args, **kwargs)
        if self._shadow is not None:
            self._shadow.outdate()
        has_scaler = self._has_precision_config and isinstance(self.scaler, LossScaler)
        if has_scaler and local_path is not None and self.checkpoint_manager.should_load_extra:
            load_scaler(self.scaler, local_path)

    def to(self, device, *args, **kwargs):
        """Move the engine, and the shadow with the actor's weights."""
        moved = super().to(device, *args, **kwargs)
        if self._shadow is not None and (args[0] if args else kwargs.get("model", True)):
            from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

            (offload_fsdp_model_to_cpu if device == "cpu" else load_fsdp_model_to_gpu)(self._shadow.module)
        return moved

    def disable_adapter(self, *args, **kwargs):
        """Leave LoRA out, of the shadow as well: it then stands for the reference."""
        without = super().disable_adapter(*args, **kwargs)
        if self._shadow is None:
            return without
        both = contextlib.ExitStack()
        both.enter_context(without)
        both.enter_context(self._shadow.module.disable_adapter())
        return both


class RefuseFSDP1OnCPU:
    """FSDP1 cannot broadcast CPU parameters (`sync_module_states=True`): refused by name, not deep inside torch."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ConfigurationError(
            "FSDP1 cannot wrap CPU parameters",
            setting="strategy",
            value="fsdp",
            allowed="fsdp2 on a CPU",
            remedy="Set actor_rollout_ref.actor.strategy=fsdp2 (and ref, critic), as scale=cpu does.",
        )


def precision_variant(base: type, name: str, *mixins: type, **members: object) -> type:
    """Subclass FSDPEngineWithLMHead or FSDPEngineWithValueHead; further mixins come first in the method resolution."""
    about = {"__module__": __name__, "__doc__": f"{base.__name__}; see {__name__}.", **members}
    return type(name, (*mixins, PrecisionFSDPEngine, base), about)


def register_nvidia_engines(transformer_impl: ModuleType) -> None:
    """Register our variant of each FSDP engine under (device=cuda, vendor=nvidia)."""
    for model_type, base in _bases(transformer_impl):
        engine = precision_variant(base, f"Precision{base.__name__}")
        for backend in ("fsdp", "fsdp2"):
            register_engine(engine, model_type, backend, NVIDIA)


def register_cpu_engines(transformer_impl: ModuleType) -> None:
    """Register a CPU variant of each FSDP engine under (device=cpu, vendor=cpu); `strategy=fsdp` is refused there.

    On a CPU, offloading then does without pinned memory, which needs an accelerator. verl offloads every reference.
    """
    wrap_once(transformer_impl.__name__, "CPUOffloadPolicy", _without_pinned_memory)
    for model_type, base in _bases(transformer_impl):
        name = f"{base.__name__}OnCPU"
        register_engine(precision_variant(base, name, always_sends_manifest=True), model_type, "fsdp2", CPU)
        register_engine(precision_variant(base, f"Refused{name}", RefuseFSDP1OnCPU), model_type, "fsdp", CPU)


def _without_pinned_memory(wrapped, instance, args, kwargs):
    return wrapped(pin_memory=False) if get_device_name() == "cpu" else wrapped(*args, **kwargs)


def _bases(transformer_impl: ModuleType) -> Iterator[tuple[str, type]]:
    yield "language_model", transformer_impl.FSDPEngineWithLMHead
    yield "value_model", transformer_impl.FSDPEngineWithValueHead
