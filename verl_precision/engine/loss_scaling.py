"""Loss scaling: torch's sharded gradient scaler, with settings, bounds, a record of each step and exact state.

The arithmetic is torch's (`ShardedGradScaler`): scale, unscale, all-reduce of "found inf" over the ranks, skip, grow,
back off. Added here: the device is the engine's (torch's default, "cuda", switches itself off elsewhere), the loss is
scaled in FP32, the scale stays within bounds, each step says what happened, and the state holds what is needed to go on
as if nothing had happened.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from verl_precision.engine.settings import LossScaleSettings
from verl_precision.errors import EnvironmentMismatchError

# Elements looked at for the underflow fraction: one in a million of a 65 B-parameter shard, all of a tiny model.
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class ScalerStep:
    """What happened in one optimizer step.

    Attributes:
        scale: S of this step's backward.
        overflow_ranks: ranks with a non-finite gradient in their shard; the step is skipped on all ranks if > 0.
        underflow_fraction: of this rank's sampled non-zero gradient elements g, those with |S·g| < 2⁻¹⁴, FP16's
            smallest normal number: they have lost bits, and smaller neighbours are already zero.
    """

    scale: float
    overflow_ranks: int
    underflow_fraction: float

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left as they were."""
        return self.overflow_ranks > 0


class LossScaler(ShardedGradScaler):
    """`ShardedGradScaler` as described in the module's docstring; used by verl like its own.

    The process group is the default one, all ranks of the engine: under HSDP each replica's shards are then part of the
    decision, so that replicas cannot drift apart.

    Attributes:
        settings: as configured.
        last_step: what happened in the latest `unscale_`; None before it.
        nonfinite: parameters of this rank whose gradient was non-finite then.
        steps_at_minimum: consecutive overflowing steps with the scale at its minimum.
    """

    def __init__(self, settings: LossScaleSettings, device: str) -> None:
        """Create the scaler.

        Args:
            settings: bounds and factors.
            device: type of the device that computes the loss, e.g. "cpu" or "cuda".

        Raises:
            EnvironmentMismatchError: if torch cannot scale on this device here.
        """
        super().__init__(
            device=device,
            init_scale=settings.initial,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            process_group=None,
        )
        if not self.is_enabled():
            raise EnvironmentMismatchError(
                "torch switched its gradient scaler off, so that FP16 gradients would underflow",
                setting="trainer.device",
                value=device,
                allowed="cpu, or an accelerator that torch sees",
                remedy="Check the installed torch build and trainer.device, or set precision=bf16.",
            )
        self.settings = settings
        self.last_step: ScalerStep | None = None
        self.nonfinite: list[Tensor] = []
        self.steps_at_minimum = 0

    def scale(self, outputs: Any) -> Any:
        """Return S·loss in FP32 or wider: S·loss may exceed FP16's range where the loss itself does not."""
        if isinstance(outputs, Tensor) and outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by S and agree with all ranks on whether they are finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        underflow = underflow_fraction(_local(p.grad) for p in parameters)
        super().unscale_(optimizer)
        found = sum(float(flag) for flag in self._found_inf_per_device(optimizer).values())
        self.nonfinite, ranks = [], 0
        if found:  # on every rank or on none: torch has all-reduced it
            self.nonfinite = [p for p in parameters if not bool(torch.isfinite(_local(p.grad)).all())]
            flag = torch.tensor(float(bool(self.nonfinite)), device=self._scale_device())
            dist.all_reduce(flag)
            ranks = int(flag)
        self.last_step = ScalerStep(self.get_scale(), ranks, underflow)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grow or back off as torch does, then keep the scale within the bounds of the settings."""
        at_minimum = self.get_scale() <= self.settings.bounds()[0]
        super().update(new_scale)
        if self.last_step is not None:
            self.steps_at_minimum = self.steps_at_minimum + 1 if at_minimum and self.last_step.skipped else 0
        self._keep_bounds()

    @property
    def exhausted(self) -> bool:
        """Whether the scale has been at its minimum for as many overflowing steps as the settings allow."""
        return self.steps_at_minimum >= self.settings.stop_after_steps_at_minimum

    def state_dict(self) -> dict[str, float]:
        """Return what a run needs to go on exactly: scale, growth counter, steps at the minimum."""
        state = super().state_dict()
        return {
            "scale": state["scale"],
            "growth_tracker": state["_growth_tracker"],
            "steps_at_minimum": self.steps_at_minimum,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on from a state; factors, interval and bounds stay those of the settings.

        Args:
            state_dict: of `state_dict`, or of torch's scaler, which a verl patched to save it hands over.
        """
        tracker = state_dict["growth_tracker" if "growth_tracker" in state_dict else "_growth_tracker"]
        super().load_state_dict(
            {
                **super().state_dict(),
                "scale": min(max(state_dict["scale"], self.settings.bounds()[0]), self.settings.bounds()[1]),
                "_growth_tracker": int(tracker),
            }
        )
        self.steps_at_minimum = int(state_dict.get("steps_at_minimum", 0))

    def _keep_bounds(self) -> None:
        low, high = self.settings.bounds()
        if not low <= self.get_scale() <= high:
            super().update(min(max(self.get_scale(), low), high))

    def _scale_device(self) -> torch.device:
        assert self._scale is not None, "unscale_ without scale"
        return self._scale.device


def underflow_fraction(scaled_gradients: Iterable[Tensor]) -> float:
    """Return the share of sampled non-zero elements below FP16's smallest normal number, |S·g| < 2⁻¹⁴.

    Args:
        scaled_gradients: gradients before unscaling, any float dtype and device; every n-th element of each is read,
            n chosen such that about 65536 are.

    Returns:
        A fraction in [0, 1]; 0 if every sampled element is zero.
    """
    flat = [gradient.detach().reshape(-1) for gradient in scaled_gradients]
    stride = max(1, sum(gradient.numel() for gradient in flat) // _SAMPLE)
    tiny, non_zero = 0, 0
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in flat:
        by_device.setdefault(gradient.device, []).append(gradient[::stride].float().abs())
    for samples in by_device.values():
        sample = torch.cat(samples)
        counts = torch.stack([((sample > 0) & (sample < torch.finfo(torch.float16).tiny)).sum(), (sample > 0).sum()])
        tiny, non_zero = tiny + int(counts[0]), non_zero + int(counts[1])
    return tiny / non_zero if non_zero else 0.0


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
