"""What the optimizer steps of one training step amount to, as metrics, and why a run had to stop."""

import math
from collections.abc import Iterable

from torch import Tensor

from verl_precision.engine.loss_scaling import LossScaler

# Parameters named in an error message.
_SHOWN = 5


class StepReport:
    """Collects the optimizer steps (mini-batches) of one training step.

    Attributes:
        last_skipped: whether the latest optimizer step left the parameters as they were.
    """

    def __init__(self) -> None:
        self.last_skipped = False
        self._applied_since_schedule = False
        self._start()

    def _start(self) -> None:
        self._skipped = 0
        self._overflow_ranks = 0
        self._underflow: list[float] = []

    def add(self, grad_norm: float, scaler: LossScaler | None) -> None:
        """Record one optimizer step.

        Args:
            grad_norm: as verl returns it; without a scaler verl skips the step if it is not finite.
            scaler: after its update, or None when the compute dtype needs none.
        """
        step = None if scaler is None else scaler.last_step
        if step is not None:
            self._overflow_ranks = max(self._overflow_ranks, step.overflow_ranks)
            self._underflow.append(step.underflow_fraction)
        self.last_skipped = step.skipped if step is not None else not math.isfinite(grad_norm)
        self._skipped += self.last_skipped
        self._applied_since_schedule |= not self.last_skipped

    def metrics(self, scaler: LossScaler | None) -> dict[str, float]:
        """Return the metrics of the steps recorded since the last call, and start anew.

        Returns:
            `precision/skipped_steps`: updates skipped in this training step; healthy: 0, now and then 1.
            With a scaler also `precision/loss_scale`: S for the next backward; `precision/overflow_rank_count`: most
            ranks with a non-finite gradient in one update; `precision/grad_underflow_fraction`: mean share of sampled
            non-zero scaled gradient elements below FP16's smallest normal number, on this rank.
        """
        found = {"precision/skipped_steps": float(self._skipped)}
        if scaler is not None:
            found["precision/loss_scale"] = scaler.get_scale()
            found["precision/overflow_rank_count"] = float(self._overflow_ranks)
            found["precision/grad_underflow_fraction"] = sum(self._underflow) / max(1, len(self._underflow))
        self._start()
        return found

    def take_applied(self) -> bool:
        """Return whether any update was applied since the last call."""
        applied, self._applied_since_schedule = self._applied_since_schedule, False
        return applied


def diagnosis(scaler: LossScaler, named_parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Say why a run cannot go on with its loss scale at the minimum.

    Args:
        scaler: exhausted.
        named_parameters: of the model, to name those with a non-finite gradient on this rank.
    """
    bad = {id(parameter) for parameter in scaler.nonfinite}
    names = [name for name, parameter in named_parameters if id(parameter) in bad]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    ranks = scaler.last_step.overflow_ranks if scaler.last_step is not None else 0
    settings = scaler.settings
    return (
        f"The last {scaler.steps_at_minimum} optimizer steps were skipped with the loss scale at its minimum, "
        f"loss_scale.minimum={settings.bounds()[0]:g}, on {ranks} rank(s); non-finite gradients on this rank: "
        f"{shown or 'none'}. So small a scale does not overflow by itself: the forward does (activations beyond "
        "FP16's 65504), or the loss or the data hold inf or NaN. Allowed are fewer such steps than "
        f"loss_scale.stop_after_steps_at_minimum={settings.stop_after_steps_at_minimum}. Look at loss and grad_norm of "
        "the steps before. Remedy: lower the learning rate, mend the data, or train this model with precision=bf16."
    )
