"""Loss scaling: torch's sharded gradient scaler, with settings, bounds, a report on each step and exact state.

The arithmetic is torch's (`ShardedGradScaler`). Additions: the device is the engine's (torch's default, "cuda", turns
the scaler off elsewhere), the loss is scaled in FP32, the scale stays within bounds, each step reports its outcome,
and a small JSON file beside verl's shards lets a resumed run continue exactly.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from verl_precision.base.dtypes import HALF, torch_dtype
from verl_precision.base.errors import CheckpointStateError, EnvironmentMismatchError
from verl_precision.base.files import write_file
from verl_precision.base.loggers import engine as logger
from verl_precision.base.state import STRICT, read_state, refused_in_words
from verl_precision.engine.settings import WORDS, LossScaleSettings

FILE_NAME = "loss_scale.json"
# Elements sampled for the underflow fraction: one in a million of a 65 B-parameter shard, all of a tiny model.
_SAMPLE = 1 << 16
_SHOWN = 5  # parameters named in an error message
_DELETE = f"Restore {FILE_NAME}, or delete it to start from loss_scale.initial."


class ScalerStep(NamedTuple):
    """What happened in one optimizer step."""

    overflow_ranks: int  # ranks with a non-finite gradient in their shard; the step is skipped on all ranks if > 0
    underflow_fraction: float

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left unchanged."""
        return self.overflow_ranks > 0


@dataclass(frozen=True, config=STRICT)
class _State:
    scale: float = Field(gt=0)
    growth_tracker: int = Field(ge=0, lt=2**31)  # updates since the scale last changed; torch's counter has 32 bits
    steps_at_minimum: int = Field(default=0, ge=0)


class LossScaler(ShardedGradScaler):
    """`ShardedGradScaler` with the additions in the module's docstring; verl uses it like its own scaler."""

    def __init__(self, settings: LossScaleSettings, device: str) -> None:
        """Create the scaler for a type of device, "cpu" or "cuda"; an error if torch cannot scale on it here."""
        super().__init__(
            device=device, init_scale=settings.initial, growth_interval=settings.growth_interval,
            growth_factor=settings.growth_factor, backoff_factor=settings.backoff_factor,
            process_group=None,  # all ranks, so that replicas of HSDP cannot drift apart
        )  # fmt: skip
        if not self.is_enabled():
            raise EnvironmentMismatchError(value=device, **WORDS["no scaler"])
        self.settings = settings
        self.last_step: ScalerStep | None = None  # what happened in the latest `unscale_`
        self.nonfinite: list[Tensor] = []  # parameters of this rank whose gradient was non-finite then
        self.steps_at_minimum = 0  # consecutive overflowing steps with the scale at its minimum

    def scale(self, outputs: Any) -> Any:
        """Return S·loss in FP32 or wider: S·loss may exceed FP16's range even if the loss does not."""
        if isinstance(outputs, Tensor) and outputs.dtype in map(torch_dtype, HALF):
            outputs = outputs.float()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S and agree with all ranks on whether they are finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        underflow = underflow_fraction(local_part(p.grad) for p in parameters)
        super().unscale_(optimizer)
        found = sum(float(flag) for flag in self._found_inf_per_device(optimizer).values())
        self.nonfinite, ranks = [], 0
        if found:  # on every rank or on none: torch has all-reduced it
            assert self._scale is not None
            self.nonfinite = [p for p in parameters if not bool(torch.isfinite(local_part(p.grad)).all())]
            flag = torch.tensor(float(bool(self.nonfinite)), device=self._scale.device)
            dist.all_reduce(flag)
            ranks = int(flag)
        self.last_step = ScalerStep(ranks, underflow)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        # torch does not wait for the copies of both values to the gradients' devices. With `offload_policy` a copy can
        # arrive after the CPU has read 1/S, or overwrite the 1.0 of "found inf". `.cpu()` waits.
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale grow or back off as in torch, then keep it within the bounds of the settings."""
        at_minimum = self.get_scale() <= self.settings.bounds()[0]
        super().update(new_scale)
        if self.last_step is not None:
            self.steps_at_minimum = self.steps_at_minimum + 1 if at_minimum and self.last_step.skipped else 0
        bounded = self._within_bounds(self.get_scale())
        if bounded != self.get_scale():
            super().update(bounded)

    @property
    def exhausted(self) -> bool:
        """Whether the scale has been at its minimum for as many overflowing steps as the settings allow."""
        return self.steps_at_minimum >= self.settings.stop_after_steps_at_minimum

    def state_dict(self) -> dict[str, float]:
        """Return the state that a run needs to continue exactly: scale, growth counter, steps at the minimum."""
        state = super().state_dict()
        scale, tracker = state["scale"], state["_growth_tracker"]
        return {"scale": scale, "growth_tracker": tracker, "steps_at_minimum": self.steps_at_minimum}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this scaler or of torch's; factors, interval and bounds stay those of the settings.

        A wrong state, or the state of a run that had to stop, raises `CheckpointStateError` and changes nothing.
        """
        interval = self.get_growth_interval()
        with refused_in_words("the state of the loss scale", _DELETE):
            if "_growth_tracker" in state_dict:
                state_dict = {"scale": state_dict["scale"], "growth_tracker": state_dict["_growth_tracker"]}
            state = _State(**state_dict)
            if state.steps_at_minimum >= self.settings.stop_after_steps_at_minimum:
                most = self.settings.stop_after_steps_at_minimum
                raise ValueError(f"steps_at_minimum={state.steps_at_minimum}: stop_after_steps_at_minimum={most}")
        scale, tracker = self._within_bounds(state.scale), min(state.growth_tracker, interval - 1)  # torch tests for ==
        super().load_state_dict({**super().state_dict(), "scale": scale, "_growth_tracker": tracker})
        self.steps_at_minimum = state.steps_at_minimum

    def _within_bounds(self, scale: float) -> float:
        low, high = self.settings.bounds()
        return min(max(scale, low), high)


def underflow_fraction(scaled_gradients: Iterable[Tensor]) -> float:
    """Return the share of non-zero elements, of about 65536, below FP16's smallest normal number, |S·g| < 2⁻¹⁴.

    Such elements have lost bits, and smaller ones are already zero.
    """
    flat = [gradient.detach().reshape(-1) for gradient in scaled_gradients]
    if not flat:
        return 0.0
    stride = max(1, sum(gradient.numel() for gradient in flat) // _SAMPLE)
    sample = torch.cat([gradient[::stride].to(flat[0].device).float().abs() for gradient in flat])
    below = (sample > 0) & (sample < torch.finfo(torch.float16).tiny)
    tiny, non_zero = torch.stack([below.sum(), (sample > 0).sum()]).tolist()  # one wait for the device
    return tiny / non_zero if non_zero else 0.0


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a parameter or gradient, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def diagnosis(scaler: LossScaler, named_parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return why a run cannot continue at the minimum loss scale, and which parameters have non-finite gradients."""
    bad = {id(parameter) for parameter in scaler.nonfinite}
    names = [name.replace("_fsdp_wrapped_module.", "") for name, parameter in named_parameters if id(parameter) in bad]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    ranks = scaler.last_step.overflow_ranks if scaler.last_step is not None else 0
    return (
        f"The last {scaler.steps_at_minimum} optimizer steps were skipped while the loss scale was at its minimum, "
        f"loss_scale.minimum={scaler.settings.bounds()[0]:g}, on {ranks} rank(s); non-finite gradients on this rank: "
        f"{shown or 'none'}. The scale is too small to cause this: the forward overflows (activations beyond "
        "FP16's 65504), or the loss or the data have inf or NaN. Allowed are fewer such steps than "
        f"loss_scale.stop_after_steps_at_minimum={scaler.settings.stop_after_steps_at_minimum}. Look at loss and "
        "grad_norm of the steps before. Remedy: lower the learning rate, mend the data, or train with precision=bf16."
    )


class StepReport:
    """Collects the optimizer steps (mini-batches) of one training step."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []  # of each optimizer step, whether it left the parameters unchanged
        self._steps: list[ScalerStep] = []
        self._applied_since_schedule = False

    def add(self, skipped: bool, step: ScalerStep | None = None) -> None:
        """Record one optimizer step; with a scaler, also the scaler's report on the step."""
        self._steps += [] if step is None else [step]
        self.skipped.append(skipped)
        self._applied_since_schedule |= not skipped

    def metrics(self, scaler: LossScaler | None) -> dict[str, float]:
        """Return the metrics of the steps recorded since the last call (docs/metrics.md), and clear the record."""
        found = {"precision/skipped_steps": float(sum(self.skipped))}
        if scaler is not None:
            underflow = [step.underflow_fraction for step in self._steps]
            found["precision/loss_scale"] = scaler.get_scale()
            found["precision/overflow_rank_count"] = float(max((s.overflow_ranks for s in self._steps), default=0))
            found["precision/grad_underflow_fraction"] = sum(underflow) / max(1, len(underflow))
        self.skipped, self._steps = [], []
        return found

    def take_applied(self) -> bool:
        """Return whether any update was applied since the last call."""
        applied, self._applied_since_schedule = self._applied_since_schedule, False
        return applied


def save_scaler(scaler: LossScaler, folder: str) -> None:
    """Write the scaler's state into a checkpoint on rank 0, whole or not at all; all ranks have the same state."""
    if dist.get_rank() == 0:
        write_file(Path(folder) / FILE_NAME, json.dumps(scaler.state_dict()), replace=True)


def load_scaler(scaler: LossScaler, folder: str) -> None:
    """Restore the scaler's state, which rank 0 reads for all, or raise `CheckpointStateError` on every rank.

    Without a state, log a warning and keep the scaler as it is.
    """
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [read_state(Path(folder) / FILE_NAME, dict, _DELETE)]
        except CheckpointStateError as error:
            message = [error]
    dist.broadcast_object_list(message, src=0)
    (found,) = message
    if isinstance(found, CheckpointStateError):
        raise found
    if found is not None:
        with refused_in_words(f"{folder}/{FILE_NAME}", _DELETE):
            scaler.load_state_dict(found)
        return
    logger.warning(
        f"{folder}: no {FILE_NAME} in this checkpoint (written without verl-precision, or by rank 0 elsewhere). "
        f"The loss scale starts at {scaler.get_scale():g}; a few steps may be skipped until it has adapted."
    )
