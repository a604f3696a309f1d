"""The trainer callback that starts a rescue, `mismatch.alarm.on_alarm=rescue` (docs/alarm.md).

A rescue needs an alarm that a smaller gap cures, evidence for some further steps, and no alarm of a fault.
"""

import logging
from collections.abc import Mapping
from typing import Any

from verl_precision.integration.trainer.saving import end_with_this_step
from verl_precision.mismatch.drift_detector import Persistence
from verl_precision.tools.actions.rescue import Action, decide_rescue, is_rescue

# Alarms that a smaller gap cures, and alarms of a fault, which prevent a rescue.
CURABLE: tuple[str, ...] = ("low_effective_sample_size", "k3_growth", "gap_growth", "phantom_clipping")
FAULTS: tuple[str, ...] = ("trainer_not_finite", "rollout_not_finite", "responses_not_finite", "policies_differ")
FAULTS += ("repeated_overflow", "loss_scale_at_minimum")

logger = logging.getLogger("verl_precision.mismatch")


class Remedy:
    """Decides at the end of each step whether a rescue starts; if so, the run ends with that step."""

    def __init__(self, trainer: Any) -> None:
        """Start without evidence, in a resumed run too. A run that is a rescue starts no other rescue."""
        self._trainer, settings = trainer, trainer.monitor.settings.alarm
        self._acts, self._is_rescue = settings.on_alarm == "rescue", is_rescue(trainer.config)
        self._persistence = Persistence(settings.action_patience)

    def _compute_metrics(
        self, proceed: Any, batch: Any, metrics: Any, *args: Any, global_steps: int, **more: Any
    ) -> None:
        metrics["alarm/rescue"] = int(self._is_rescue)
        proceed(batch, metrics, *args, global_steps=global_steps, **more)
        begun = self.decide(global_steps, self._trainer.monitor.alarm.active_since)
        if begun is not None:
            decide_rescue(self._trainer.config, begun)
            end_with_this_step(self._trainer)

    def decide(self, step: int, active: Mapping[str, int]) -> Action | None:
        """Return the action that starts after a step; `active` has the step of each active alarm's first evidence."""
        curable = [name for name in CURABLE if name in active]
        due = self._persistence.update(step, bool(curable) and not any(name in active for name in FAULTS))
        if not (due and self._acts):
            return None
        begun = Action(curable[0], step, min(active[name] for name in curable))
        logger.warning("ACTION rescue at step %d: %s since step %d", step, begun.alarm, begun.since_step)
        return begun
