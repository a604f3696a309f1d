"""The rim: mixins that put loss scaling, FP32 log-probs and verified dtypes into verl's FSDP engines.

verl builds and drives the scaler as it does its own; these mixins choose which scaler that is, and read what happened.
An engine whose config is not `PrecisionFSDPConfig` takes verl's path in every method.
"""

import functools
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_precision.engine.checkpoint import load_scaler, save_scaler
from verl_precision.engine.forward_dtypes import ForwardDtypes
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.engine.output_head import compute_in_fp32
from verl_precision.engine.report import StepReport, diagnosis
from verl_precision.engine.settings import DTYPES
from verl_precision.errors import LossScaleError, RegistrationError
from verl_precision.integration.engine_config import PrecisionFSDPConfig
from verl_precision.integration.shadow_engine import ShadowForward
from verl_precision.integration.weight_export import ExactWeights, write_export_dtype

NVIDIA = ("cuda", "nvidia")  # (device, vendor): wins over verl's device-only key without clashing with it


class ScaledLoss:
    """Loss scaling by our settings, its metrics, a schedule that waits, and state in checkpoints."""

    engine_config: Any
    checkpoint_manager: Any
    lr_scheduler: Any
    module: Any
    scaler: Any
    _report: StepReport

    @property
    def _precise(self) -> bool:
        return isinstance(self.engine_config, PrecisionFSDPConfig)

    def _build_fsdp_module(self, module):
        if not self._precise:
            return super()._build_fsdp_module(module)
        with warnings.catch_warnings():  # verl's scaler, replaced below, says that it is off without CUDA
            warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available")
            module = super()._build_fsdp_module(module)
        self._report = StepReport()
        if self.scaler is not None:
            forward_only = self.engine_config.forward_only
            self.scaler = None if forward_only else LossScaler(self.engine_config.loss_scale, get_device_name())
        return module

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
        """Unscale, clip, step or skip, and update the scale, as verl does with the scaler it finds.

        Returns:
            Norm of the unscaled gradients before clipping; non-finite if the step was skipped.

        Raises:
            LossScaleError: when the gradients stay non-finite with the scale at its minimum.
        """
        grad_norm = super().optimizer_step()
        if self._precise:
            self._report.add(grad_norm, self.scaler)
            if self.scaler is not None and self.scaler.exhausted:
                raise LossScaleError(diagnosis(self.scaler, self.module.named_parameters()))
        return grad_norm

    def lr_scheduler_step(self):
        """Advance the schedule, unless every update since the last call was skipped.

        Returns:
            The learning rate of the first parameter group.
        """
        if not self._precise or self._report.take_applied():
            return super().lr_scheduler_step()
        return self.lr_scheduler.get_last_lr()[0]

    def save_checkpoint(self, local_path, *args, **kwargs):
        """Save verl's checkpoint and, before the barrier that ends the call, scaler state and the export's dtype."""
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


class VerifiedForward:
    """Every forward is checked against the compute dtype of the config; the output head is FP32 if asked for."""

    engine_config: Any
    model_config: Any
    _dtypes: ForwardDtypes
    _precise: bool

    def _build_fsdp_module(self, module):
        if not self._precise:
            return super()._build_fsdp_module(module)
        head = None
        if self.engine_config.fp32_output_head and self.model_config.model_type == "language_model":
            head = compute_in_fp32(module)
        module = super()._build_fsdp_module(module)
        role = "critic" if self.model_config.model_type == "value_model" else "actor"
        self._dtypes = ForwardDtypes(
            module,
            role="reference" if self.engine_config.forward_only else role,
            expected=getattr(torch, DTYPES[self.engine_config.compute_dtype]),
            exempt=head,
        )
        return module

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Do verl's forward step, then compare the dtypes seen in the model with the config.

        Raises:
            PrecisionContradictionError: if a matrix product gave another dtype.
        """
        result = super().forward_step(micro_batch, loss_function, forward_only)
        if self._precise:
            self._dtypes.check()
        return result


class FP32LogProbs:
    """Temperature, log-probs and entropy in FP32, chunk by chunk."""

    engine_config: Any
    _gather_and_unpad_packed: Any

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Return nested log-probs and entropy in FP32.

        Fused kernels never show their logits: verl's path. Distillation and Σπ² need the whole logits: verl's path on
        FP32 logits, whose memory no chunk bounds.
        """
        ask = functools.partial(tu.get_non_tensor_data, data=micro_batch, default=False)
        config = self.engine_config
        if not isinstance(config, PrecisionFSDPConfig) or not config.fp32_log_probs or ask(key="use_fused_kernels"):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if any(ask(key=k) for k in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")):
            output.logits = output.logits.float()
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        offsets = micro_batch["input_ids"].offsets()
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        if packed:
            logits_NV, temperature_N = logits.squeeze(0), output_args["temperature_rmpad"]
        else:
            lengths = offsets.diff()
            logits_NV = logits[torch.arange(logits.shape[1], device=logits.device) < lengths.unsqueeze(1)]
            temperature_N = output_args["temperature"].repeat_interleave(lengths)
        log_probs, entropy = log_probs_and_entropy(
            logits_NV,
            output_args["input_ids_rmpad_rolled"],
            temperature_N,
            chunk_tokens=config.log_prob_chunk_tokens,
            with_entropy=bool(ask(key="calculate_entropy")),
        )
        outputs = {"log_probs": log_probs, **({} if entropy is None else {"entropy": entropy})}
        if packed:
            outputs = {k: self._gather_and_unpad_packed(v, output_args["pad_size"]) for k, v in outputs.items()}
        return {k: torch.nested.nested_tensor_from_jagged(v, offsets) for k, v in outputs.items()}


def precision_variant(base: type, name: str, *mixins: type, module: str = __name__) -> type:
    """Subclass one of verl's FSDP engines.

    Args:
        base: FSDPEngineWithLMHead or FSDPEngineWithValueHead.
        name: of the new class.
        mixins: further ones, first in the order of method resolution.
        module: who defines it.
    """
    ours: tuple[type, ...] = (VerifiedForward, ScaledLoss)
    if not issubclass(base, FSDPEngineWithValueHead):
        ours = (ShadowForward, FP32LogProbs, VerifiedForward, ExactWeights, ScaledLoss)
    return type(name, (*mixins, *ours, base), {"__module__": module, "__doc__": f"{base.__name__}; see {module}."})


def register_variant(engine: type, model_type: str, backend: str, key: tuple[str, str]) -> None:
    """Register an engine under a (device, vendor) key, once.

    Raises:
        RegistrationError: if another package owns the key.
    """
    owner = EngineRegistry._engines.get(model_type, {}).get(backend, {}).get(key)
    if owner is not None and owner.__module__ != engine.__module__:
        raise RegistrationError(
            f"verl engine {model_type}/{backend} for (device, vendor) {key} is already registered by "
            f"{owner.__module__}.{owner.__qualname__}",
            remedy="Uninstall one of the two packages.",
        )
    if owner is None:
        EngineRegistry.register(model_type=model_type, backend=backend, device=key[0], vendor=key[1])(engine)


def register_nvidia_engines(transformer_impl: ModuleType) -> None:
    """Register our variant of each FSDP engine under (device=cuda, vendor=nvidia)."""
    for model_type, base in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        engine = precision_variant(base, f"Precision{base.__name__}")
        for backend in ("fsdp", "fsdp2"):
            register_variant(engine, model_type, backend, NVIDIA)
