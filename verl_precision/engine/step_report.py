"""What the optimizer steps of one training step did, as metrics."""

from verl_precision.engine.loss_scaling import LossScaler, ScalerStep


class StepReport:
    """Collects the optimizer steps (mini-batches) of one training step."""

    def __init__(self) -> None:
        self._skipped: list[bool] = []
        self._steps: list[ScalerStep] = []
        self._applied_since_schedule = False

    @property
    def last_skipped(self) -> bool:
        """Whether the latest optimizer step left the parameters as they were."""
        return bool(self._skipped) and self._skipped[-1]

    def add(self, skipped: bool, step: ScalerStep | None = None) -> None:
        """Record one optimizer step; with a scaler also what it says of it."""
        self._steps += [] if step is None else [step]
        self._skipped.append(skipped)
        self._applied_since_schedule |= not skipped

    def metrics(self, scaler: LossScaler | None) -> dict[str, float]:
        """Return the metrics of the steps recorded since the last call, and start anew.

        Returns:
            `precision/skipped_steps`: updates skipped in this training step; healthy: 0, now and then 1.
            With a scaler also `precision/loss_scale`: S for the next backward; `precision/overflow_rank_count`: most
            ranks with a non-finite gradient in one update; `precision/grad_underflow_fraction`: mean share of sampled
            non-zero scaled gradient elements below FP16's smallest normal number, on this rank.
        """
        found = {"precision/skipped_steps": float(sum(self._skipped))}
        if scaler is not None:
            underflow = [step.underflow_fraction for step in self._steps]
            found["precision/loss_scale"] = scaler.get_scale()
            found["precision/overflow_rank_count"] = float(max((s.overflow_ranks for s in self._steps), default=0))
            found["precision/grad_underflow_fraction"] = sum(underflow) / max(1, len(underflow))
        self._skipped, self._steps = [], []
        return found

    def take_applied(self) -> bool:
        """Return whether any update was applied since the last call."""
        applied, self._applied_since_schedule = self._applied_since_schedule, False
        return applied
