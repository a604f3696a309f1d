"""Mixins that put loss scaling, FP32 log-probs and verified dtypes into verl's FSDP engines.

verl builds and drives the scaler as it does its own; these mixins choose which scaler that is, and read what happened.
An engine whose config is not `PrecisionFSDPConfig` takes verl's path in every method.
"""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_precision.base.errors import ConfigurationError, LossScaleError, RegistrationError
from verl_precision.engine.forward_dtypes import ForwardDtypes, compute_head_in_fp32
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.loss_scaling import LossScaler, diagnosis, load_scaler, save_scaler
from verl_precision.engine.rounded_weights import ROUNDED_TO, rounded_weights
from verl_precision.engine.settings import DTYPES
from verl_precision.engine.step_report import StepReport
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.router_replay import RouterReplay
from verl_precision.integration.engine.sampling_masks import kept_tokens
from verl_precision.integration.engine.shadow_engine import ShadowForward
from verl_precision.integration.engine.weight_export import ExactWeights, write_export_dtype
from verl_precision.integration.ledger import wrap_once
from verl_precision.integration.trainer.kept_files import spare_marked

# (device, vendor): verl prefers such a key to its own, which names the device only, and the two cannot clash.
NVIDIA, CPU = ("cuda", "nvidia"), ("cpu", "cpu")


class VerifiedScaledTraining:
    """Loss scaling by our settings, its metrics, a schedule that waits, state in checkpoints, and verified dtypes."""

    engine_config: Any
    model_config: Any
    checkpoint_manager: Any
    lr_scheduler: Any
    module: Any
    scaler: Any
    _dtypes: ForwardDtypes
    _report: StepReport

    @property
    def _precise(self) -> bool:
        return isinstance(self.engine_config, PrecisionFSDPConfig)

    def _build_fsdp_module(self, module):
        if not self._precise:
            return super()._build_fsdp_module(module)
        config, head = self.engine_config, None
        if config.fp32_output_head and self.model_config.model_type == "language_model":
            head = compute_head_in_fp32(module)
        role = "critic" if self.model_config.model_type == "value_model" else "actor"
        # Before sharding: under FSDP1 the modules then have no matrix of their own any more.
        self._dtypes = ForwardDtypes(
            module,
            role="reference" if config.forward_only else role,
            expected=getattr(torch, DTYPES[config.compute_dtype]),
            exempt=head,
        )
        with warnings.catch_warnings():  # verl's scaler, replaced below, says that it is off without CUDA
            warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available")
            module = super()._build_fsdp_module(module)
        self._report = StepReport()
        if self.scaler is not None:
            self.scaler = None if config.forward_only else LossScaler(config.loss_scale, get_device_name())
        return module

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step, then compare the dtypes seen in the model with the config.

        The canary asks for weights rounded to the rollout's dtype (`ROUNDED_TO`).
        """
        coarser = tu.get_non_tensor_data(data=micro_batch, key=ROUNDED_TO, default=None) if self._precise else None
        rounded = rounded_weights(self.module, getattr(torch, coarser)) if coarser else contextlib.nullcontext()
        with rounded:
            result = super().forward_step(micro_batch, loss_function, forward_only)
        if self._precise:
            self._dtypes.check()
        return result

    def train_batch(self, data, loss_function):
        """Train on a mini-batch as verl does; at the last one of a step also report what the scaler did."""
        outputs = super().train_batch(data, loss_function)
        if self._precise and self.is_mp_src_rank_with_outputs():
            metrics = outputs["metrics"]
            if self._report.last_skipped:  # verl averages it over mini-batches: one inf would hide all others
                metrics.pop("grad_norm")
            if tu.get(data, key="update_lr_scheduler", default=True):
                # lists, as verl's own: it joins those of all ranks
                metrics.update({key: [value] for key, value in self._report.metrics(self.scaler).items()})
        return outputs

    def optimizer_step(self):
        """Do verl's step with our scaler; raise LossScaleError when the scale can fall no further."""
        grad_norm = super().optimizer_step()
        if self._precise:
            self._report.add(grad_norm, self.scaler)
            if self.scaler is not None and self.scaler.exhausted:
                raise LossScaleError(diagnosis(self.scaler, self.module.named_parameters()))
        return grad_norm

    def lr_scheduler_step(self):
        """Advance the schedule, unless every update since the last call was skipped."""
        if not self._precise or self._report.take_applied():
            return super().lr_scheduler_step()
        return self.lr_scheduler.get_last_lr()[0]

    def save_checkpoint(self, local_path, *args, **kwargs):
        """Save verl's checkpoint and, before the barrier that ends the call, scaler state and the export's dtype."""
        if self._precise:
            spare_marked(self.checkpoint_manager)
        super().save_checkpoint(local_path, *args, **kwargs)
        if local_path is None or not self._precise:
            return
        if self._has_scaler() and self.checkpoint_manager.should_save_extra:
            save_scaler(self.scaler, local_path)
        if torch.distributed.get_rank() == 0:
            write_export_dtype(str(Path(local_path) / "huggingface"), DTYPES[self.engine_config.compute_dtype])
        torch.distributed.barrier()

    def load_checkpoint(self, local_path, *args, **kwargs):
        """Load verl's checkpoint and the scaler's state; a checkpoint without it loads with a warning."""
        super().load_checkpoint(local_path, *args, **kwargs)
        if self._has_scaler() and local_path is not None and self.checkpoint_manager.should_load_extra:
            load_scaler(self.scaler, local_path)

    def _has_scaler(self) -> bool:
        return self._precise and isinstance(self.scaler, LossScaler)


class FP32LogProbs:
    """Temperature, log-probs and entropy in FP32, chunk by chunk."""

    engine_config: Any
    _precise: bool
    _gather_and_unpad_packed: Any

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Return nested log-probs and entropy in FP32.

        Fused kernels never show their logits: verl's path. Distillation and Σπ² need the whole logits: verl's path on
        FP32 logits, whose memory no chunk bounds.
        """
        verls = partial(super().prepare_model_outputs, output, output_args, micro_batch, logits_processor_func)
        ask = partial(tu.get_non_tensor_data, data=micro_batch, default=False)
        if not self._precise or not self.engine_config.fp32_log_probs or ask(key="use_fused_kernels"):
            return verls()
        if any(ask(key=k) for k in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")):
            output.logits = output.logits.float()
            return verls()
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        offsets = micro_batch["input_ids"].offsets()
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        if packed:
            logits_NV, temperature_N = logits.squeeze(0), output_args["temperature_rmpad"]
        else:
            lengths = offsets.diff()
            logits_NV = logits[torch.arange(logits.shape[1], device=logits.device) < lengths.unsqueeze(1)]
            temperature_N = output_args["temperature"].repeat_interleave(lengths)
        labels_N = output_args["input_ids_rmpad_rolled"]
        log_probs, entropy = log_probs_and_entropy(
            logits_NV,
            labels_N,
            temperature_N,
            chunk_tokens=self.engine_config.log_prob_chunk_tokens,
            with_entropy=bool(ask(key="calculate_entropy")),
            kept=kept_tokens(micro_batch, labels_N),
        )
        outputs = {"log_probs": log_probs, **({} if entropy is None else {"entropy": entropy})}
        if packed:
            outputs = {k: self._gather_and_unpad_packed(v, output_args["pad_size"]) for k, v in outputs.items()}
        return {k: torch.nested.nested_tensor_from_jagged(v, offsets) for k, v in outputs.items()}


class AlwaysManifest:
    """Weights can be loaded again on a CPU by `VerifiedWeightSyncExtension` only, which reads the manifest."""

    _sends_manifest = True


class FSDP1Refused:
    """FSDP1 cannot broadcast CPU parameters (`sync_module_states=True`): refused by name, not deep inside torch."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ConfigurationError(
            "FSDP1 cannot wrap CPU parameters",
            setting="strategy",
            value="fsdp",
            allowed="fsdp2 on a CPU",
            remedy="Set actor_rollout_ref.actor.strategy=fsdp2 (and ref, critic), as scale=cpu does.",
        )


def precision_variant(base: type, name: str, *mixins: type) -> type:
    """Subclass FSDPEngineWithLMHead or FSDPEngineWithValueHead; further mixins come first in the method resolution."""
    ours: tuple[type, ...] = (VerifiedScaledTraining,)
    if not issubclass(base, FSDPEngineWithValueHead):
        ours = (ShadowForward, RouterReplay, FP32LogProbs, ExactWeights, VerifiedScaledTraining)
    return type(name, (*mixins, *ours, base), {"__module__": __name__, "__doc__": f"{base.__name__}; see {__name__}."})


def register_nvidia_engines(transformer_impl: ModuleType) -> None:
    """Register our variant of each FSDP engine under (device=cuda, vendor=nvidia)."""
    for model_type, base in _bases(transformer_impl):
        engine = precision_variant(base, f"Precision{base.__name__}")
        for backend in ("fsdp", "fsdp2"):
            _register(engine, model_type, backend, NVIDIA)


def register_cpu_engines(transformer_impl: ModuleType) -> None:
    """Register a CPU variant of each FSDP engine under (device=cpu, vendor=cpu); `strategy=fsdp` is refused there.

    On a CPU, offloading then does without pinned memory, which needs an accelerator. verl offloads every reference.
    """
    wrap_once(transformer_impl.__name__, "CPUOffloadPolicy", _without_pinned_memory)
    for model_type, base in _bases(transformer_impl):
        name = f"{base.__name__}OnCPU"
        _register(precision_variant(base, name, AlwaysManifest), model_type, "fsdp2", CPU)
        _register(precision_variant(base, f"Refused{name}", FSDP1Refused), model_type, "fsdp", CPU)


def _without_pinned_memory(wrapped, instance, args, kwargs):
    return wrapped(pin_memory=False) if get_device_name() == "cpu" else wrapped(*args, **kwargs)


def _bases(transformer_impl: ModuleType) -> Iterator[tuple[str, type]]:
    yield "language_model", transformer_impl.FSDPEngineWithLMHead
    yield "value_model", transformer_impl.FSDPEngineWithValueHead


def _register(engine: type, model_type: str, backend: str, key: tuple[str, str]) -> None:
    """Register an engine under a (device, vendor) key, once; refuse a key that another package owns."""
    owner = EngineRegistry._engines.get(model_type, {}).get(backend, {}).get(key)
    if owner is not None and owner.__module__ != engine.__module__:
        raise RegistrationError(
            f"verl engine {model_type}/{backend} for (device, vendor) {key} is already registered by "
            f"{owner.__module__}.{owner.__qualname__}",
            remedy="Uninstall one of the two packages.",
        )
    if owner is None:
        EngineRegistry.register(model_type=model_type, backend=backend, device=key[0], vendor=key[1])(engine)
