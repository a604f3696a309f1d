"""verl's FSDP engines with loss scaling, FP32 log-probs, verified dtypes, a shadow, router replay and exact weights.

`PrecisionFSDPEngine` overrides each method of verl once. The method shows the order of its phases, whose code is in
other modules. An engine whose config is not ours is a `VerlsFSDPEngine`.
"""

import contextlib
import functools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_precision.base.dtypes import long, torch_dtype
from verl_precision.base.errors import LossScaleError
from verl_precision.engine.forward_dtypes import ForwardDtypes
from verl_precision.engine.loss_scaling import StepReport, diagnosis, load_scaler, save_scaler
from verl_precision.engine.shadow import ROUNDED_TO, ShadowModel, loss_beside_shadow, rounded_weights
from verl_precision.integration.engine import build
from verl_precision.integration.engine.build import CPU, NVIDIA, by_config, register_engines
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.measurement import updates_of
from verl_precision.integration.engine.model_outputs import fp32_outputs
from verl_precision.integration.engine.router_replay import RouterReplay
from verl_precision.integration.engine.weight_export import merged_lora, served_lora, write_export_dtype
from verl_precision.integration.ledger import wrap_once
from verl_precision.integration.trainer.checkpoints import adopt_earlier


class VerlsFSDPEngine(build.PartsOfEngine):
    """The mixin before verl's engine: verl's path, arithmetic and a CPU's manifest, which need no config of ours."""

    engine_config: Any

    @property
    def is_critic(self) -> bool:
        """Whether the engine returns values instead of log-probs."""
        return isinstance(self, FSDPEngineWithValueHead)

    @property
    def is_actor(self) -> bool:
        """Whether the engine trains a policy."""
        return not (self.engine_config.forward_only or self.is_critic)

    def steps(self) -> list[build.Step]:
        """Return the steps of the build."""
        return [*build.optional_steps(self), VerlsFSDPEngine.sharded, build.send_digests]

    def _build_fsdp_module(self, module):
        self.parts = []
        for step in self.steps():
            module = step(self, module)
        return module

    def sharded(self, module):
        """Return a model as verl builds and shards it."""
        return super()._build_fsdp_module(module)


class PrecisionFSDPEngine:
    """The mixin that comes before `VerlsFSDPEngine` where the config is ours."""

    dtypes: ForwardDtypes
    shadow: ShadowModel | None = None
    replay: RouterReplay | None = None
    sends_weights = True  # to a rollout
    adapter_layers: dict[str, Any]  # the actor's LoRA layers, without weights

    def steps(self) -> list[build.Step]:
        """Return the steps of the build."""
        self.report = StepReport()
        return build.steps_of(self)

    # Forward: shadow, router replay, canary, verl's step, verification.

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step; with `ratio_source=shadow` log-probs are the shadow's, gradients the trainer's."""
        if self.replay is not None:  # a run with replay has no shadow
            return self.replay.step(self.verified_step, micro_batch, loss_function, forward_only)
        ratio_from_shadow = self.engine_config.shadow.ratio_source == "shadow"
        if self.shadow is None or (forward_only and not ratio_from_shadow):
            return self.verified_step(micro_batch, loss_function, forward_only)
        if forward_only:
            return self.shadow.step(self.module, micro_batch, loss_function)
        if ratio_from_shadow or updates_of(self).need_shadow(self.engine_config.shadow):
            shadow_log_probs = self.shadow.step(self.module, micro_batch)[1]["model_output"]["log_probs"]
            loss_function = loss_beside_shadow(loss_function, shadow_log_probs, ratio_from_shadow)
        return self.verified_step(micro_batch, loss_function, False)

    def verified_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step (with rounded weights for the canary), then compare its dtypes with the config."""
        coarser = tu.get_non_tensor_data(data=micro_batch, key=ROUNDED_TO, default=None)
        with rounded_weights(self.module, torch_dtype(coarser)) if coarser else contextlib.nullcontext():
            result = super().forward_step(micro_batch, loss_function, forward_only)
        self.dtypes.check()
        return result

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Return log-probs and entropy in FP32, or verl's if the config disables this; a critic's values are verl's."""
        given = output, output_args, micro_batch
        verls = functools.partial(super().prepare_model_outputs, *given, logits_processor_func)
        if self.engine_config.fp32_log_probs and not self.is_critic:
            return fp32_outputs(self, *given, verls)
        return verls()

    # Update: verl's mini-batch, which `measurement.py` measures, then the reports of scaler and parts.

    def optimizer_step(self):
        """Do verl's step with our scaler; raise LossScaleError when the scale can fall no further."""
        with contextlib.ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.around_step(self))
            grad_norm = super().optimizer_step()
        if self.shadow is not None:
            self.shadow.outdate()
        step = None if self.scaler is None else self.scaler.last_step
        self.report.add(step.skipped if step is not None else not math.isfinite(grad_norm), step)  # verl's test
        if self.scaler is not None and self.scaler.exhausted:
            raise LossScaleError(diagnosis(self.scaler, self.module.named_parameters()))
        return grad_norm

    def lr_scheduler_step(self):
        """Advance the schedule, unless every update since the last call was skipped."""
        return super().lr_scheduler_step() if self.report.take_applied() else self.lr_scheduler.get_last_lr()[0]

    # Weights: to the rollout, to a checkpoint and from one, to another device.

    def trained_weights(self, *args, **kwargs):
        """Return verl's weight stream; for an adapter under FSDP1 with whole tensors."""
        weights, peft_config = super().trained_weights(*args, **kwargs)
        if peft_config is not None and kwargs.get("base_sync_done") and self.engine_config.strategy == "fsdp":
            weights = served_lora(self)
        return weights, peft_config

    def _merged_lora_per_tensor_param(self, *args, **kwargs):
        return merged_lora(self)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        """Save verl's checkpoint and, before the barrier that ends the call, scaler state and the export's dtype."""
        first = torch.distributed.get_rank() == 0
        if local_path is not None and first:  # this rank removes old checkpoints
            adopt_earlier(self.checkpoint_manager, local_path, max_ckpt_to_keep)
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        if local_path is None:
            return
        if self.scaler is not None and self.checkpoint_manager.should_save_extra:
            save_scaler(self.scaler, local_path)
        if first:
            write_export_dtype(str(Path(local_path) / "huggingface"), long(self.engine_config.compute_dtype))
            if self.model_config.lora_rank and not self.is_critic:  # verl saves only rank and alpha
                adapter = getattr(self.module, "_fsdp_wrapped_module", self.module).peft_config["default"]
                adapter.save_pretrained(local_path)
        torch.distributed.barrier()

    def load_checkpoint(self, local_path, *args, **kwargs):
        """Load verl's checkpoint and the scaler's state; a checkpoint without it loads with a warning."""
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.shadow is not None:
            self.shadow.outdate()
        if self.scaler is not None and local_path is not None and self.checkpoint_manager.should_load_extra:
            load_scaler(self.scaler, local_path)

    def to(self, device, *args, **kwargs):
        """Move the engine, and the shadow with the actor's weights."""
        moved = super().to(device, *args, **kwargs)
        if self.shadow is not None and (args[0] if args else kwargs.get("model", True)):
            from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

            (offload_fsdp_model_to_cpu if device == "cpu" else load_fsdp_model_to_gpu)(self.shadow.module)
        return moved

    def disable_adapter(self, *args, **kwargs):
        """Turn LoRA off, in the shadow too, which then stands for the reference."""
        both = contextlib.ExitStack()
        both.enter_context(super().disable_adapter(*args, **kwargs))
        if self.shadow is not None:
            both.enter_context(self.shadow.module.disable_adapter())
        return both


def precision_variant(base: type, name: str, *mixins: type) -> type:
    """Return a subclass of FSDPEngineWithLMHead or FSDPEngineWithValueHead; `mixins` come before verl's path."""
    return by_config(base, name, PrecisionFSDPConfig, PrecisionFSDPEngine, *mixins, VerlsFSDPEngine)


def register_nvidia_engines(transformer_impl: ModuleType) -> None:
    """Register our variant of each FSDP engine under (device=cuda, vendor=nvidia)."""
    _register(transformer_impl, "Precision{}", ("fsdp", "fsdp2"), NVIDIA)


def register_cpu_engines(transformer_impl: ModuleType) -> None:
    """Register a CPU variant of each FSDP2 engine under (device=cpu, vendor=cpu); offload without pinned memory."""
    wrap_once(transformer_impl.__name__, "CPUOffloadPolicy", _without_pinned_memory)
    _register(transformer_impl, "{}OnCPU", ("fsdp2",), CPU)


def _without_pinned_memory(wrapped, instance, args, kwargs):
    return wrapped(pin_memory=False) if get_device_name() == "cpu" else wrapped(*args, **kwargs)


def _register(transformer_impl: ModuleType, name: str, backends: tuple[str, ...], key: tuple[str, str]) -> None:
    heads = transformer_impl.FSDPEngineWithLMHead, transformer_impl.FSDPEngineWithValueHead
    register_engines((precision_variant(base, name.format(base.__name__)) for base in heads), backends, key)
