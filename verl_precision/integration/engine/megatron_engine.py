"""verl's Megatron engines with two additions: an overflow skips an update, and weight streams are verified.

Megatron has its own FP16. A dynamic loss scale causes overflows by design. When Megatron reports one, verl raises
`NotImplementedError`. Here the update is skipped and counted, as in our FSDP engine, and the schedule waits for it.
None of this was run on a GPU.
"""

import math
from types import ModuleType
from typing import Any

from verl_precision.base.errors import LossScaleError
from verl_precision.engine.loss_scaling import StepReport
from verl_precision.integration.engine.build import NVIDIA, PartsOfEngine, by_config, digester, register_engines
from verl_precision.integration.engine.engine_config import PrecisionMcoreConfig

STOP_AFTER = 10  # consecutive skipped updates with the loss scale at its minimum; as in our FSDP engine


class PrecisionMegatronEngine(PartsOfEngine):
    """The mixin that comes before MegatronEngineWithLMHead or MegatronEngineWithValueHead."""

    engine_config: Any
    optimizer_config: Any
    optimizer: Any
    _skipped = False  # whether the latest update was skipped
    _skipped_at_minimum = 0

    def _build_optimizer(self):
        """Build Megatron's optimizer. Its step always reports success to verl; `_skipped` has the true result."""
        optimizer = super()._build_optimizer()
        self.report, self.parts = StepReport(), [digester()] if self.engine_config.send_weight_manifest else []
        step = optimizer.step

        def reported() -> tuple[bool, Any, Any]:
            at_minimum = self._loss_scale() <= self._smallest_scale()
            updated, grad_norm, zeros = step()
            self._skipped = not updated
            self._skipped_at_minimum = self._skipped_at_minimum + 1 if self._skipped and at_minimum else 0
            return True, grad_norm if updated else math.nan, zeros

        optimizer.step = reported
        return optimizer

    def optimizer_step(self):
        """Do verl's step; raise LossScaleError when the loss scale can fall no further."""
        grad_norm = super().optimizer_step()
        self.report.add(self._skipped)  # not by the norm: Megatron applies a step whose norm is NaN
        if self._skipped_at_minimum >= STOP_AFTER:
            raise LossScaleError(
                f"{STOP_AFTER} updates in a row were skipped: gradients overflow at the smallest loss scale, "
                f"{self._smallest_scale():g}",
                remedy="The forward or backward pass itself overflows. Train in BF16 (precision=bf16), or lower "
                "optim.override_optimizer_config.min_loss_scale.",
            )
        return grad_norm

    def lr_scheduler_step(self):
        """Advance the schedule, unless every update since the last call was skipped."""
        return super().lr_scheduler_step() if self.report.take_applied() else self.optimizer.param_groups[0]["lr"]

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the training step that ends."""
        scale = {"precision/loss_scale": self._loss_scale()} if self.engine_config.dtype == "float16" else {}
        return super().take_metrics() | scale

    def _loss_scale(self) -> float:
        return float(self.optimizer.get_loss_scale())

    def _smallest_scale(self) -> float:
        return float((self.optimizer_config.override_optimizer_config or {}).get("min_loss_scale", 1))


def register_megatron_engines(transformer_impl: ModuleType) -> None:
    """Register our variant of each Megatron engine under (device=cuda, vendor=nvidia)."""
    heads = transformer_impl.MegatronEngineWithLMHead, transformer_impl.MegatronEngineWithValueHead
    ours = PrecisionMcoreConfig, PrecisionMegatronEngine
    register_engines((by_config(base, f"Precision{base.__name__}", *ours) for base in heads), ["megatron"], NVIDIA)
