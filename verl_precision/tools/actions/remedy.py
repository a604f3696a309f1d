"""The trainer callback of an alarm that acts, `mismatch.alarm.on_alarm` (docs/alarm.md): when, and what.

A remedy wants more than an alarm: a cause that it cures, evidence for some further steps, and no alarm of a fault, of
which a change of the learning rate or of the precision would only hide the cause.
"""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import open_dict

from verl_precision.base.state import refused_in_words, require_fields
from verl_precision.integration.trainer.saving import end_with_this_step
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.drift_detector import Persistence
from verl_precision.mismatch.settings import REMEDIES
from verl_precision.tools.actions.learning_rate import LOWER_RATE
from verl_precision.tools.actions.rescue import Action, decide_rescue, is_rescue

# What a smaller gap cures; and alarms of a fault, beside which nothing is done.
CURABLE: tuple[str, ...] = ("low_effective_sample_size", "k3_growth", "gap_growth", "phantom_clipping")
FAULTS: tuple[str, ...] = ("trainer_not_finite", "rollout_not_finite", "responses_not_finite", "policies_differ")
FAULTS += ("repeated_overflow", "loss_scale_at_minimum")

logger = logging.getLogger("verl_precision.mismatch")


class Remedy:
    """Decides at the end of a step whether the alarm's action begins or ends, and acts in the next ones."""

    def __init__(self, trainer: Any) -> None:
        """Begin without evidence; in the run that a rescue began, nothing is decided and it is under way."""
        self._trainer, settings = trainer, trainer.monitor.settings.alarm
        self.kind = settings.on_alarm
        self._is_rescue = is_rescue(trainer.config)
        self._persistence = Persistence(settings.action_patience)
        if self.kind in REMEDIES:
            trainer.monitor.memories["actions"] = self

    @property
    def active(self) -> bool:
        """Whether an action is under way."""
        return self._persistence.active

    def _compute_advantage(self, proceed, batch, metrics):
        """Have verl's rejection, while masked, leave out responses (`seq_sum_k1`) without 1/C ≤ π/μ ≤ C."""
        if not (self.kind == "mask" and self.active):
            return proceed(batch, metrics=metrics)
        correction = self._trainer.config.algorithm.rollout_correction
        most = self._trainer.monitor.settings.ratio_threshold
        mask = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": f"{1 / most}_{most}"}
        before = {key: correction.get(key) for key in mask}
        with open_dict(correction):
            try:
                correction.update(mask)
                return proceed(batch, metrics=metrics)
            finally:
                correction.update(before)

    def _update_actor(self, proceed, batch, metrics):
        if self.kind == "lower_learning_rate" and self.active:
            batch.extra_info[LOWER_RATE] = True
        return proceed(batch, metrics=metrics)

    def _compute_metrics(
        self, proceed: Any, batch: Any, metrics: Any, *args: Any, global_steps: int, **more: Any
    ) -> None:
        if self._is_rescue:
            metrics[names.acting("rescue")] = 1
        elif self.kind in REMEDIES:
            metrics[names.acting(self.kind)] = int(self.active and self.kind != "rescue")
        proceed(batch, metrics, *args, global_steps=global_steps, **more)
        begun = self.decide(global_steps, self._trainer.monitor.alarm.active_since)
        if begun is not None and self.kind == "rescue":
            decide_rescue(self._trainer.config, begun)
            end_with_this_step(self._trainer)

    def decide(self, step: int, active: Mapping[str, int]) -> Action | None:
        """Take the alarms that are active after a step, by the step of their first evidence; return what begins."""
        if self.kind not in REMEDIES:
            return None
        was_active, curable = self.active, [name for name in CURABLE if name in active]
        due = self._persistence.update(step, bool(curable) and not any(name in active for name in FAULTS))
        if was_active and not self.active:
            logger.warning("ACTION %s ended at step %d: the alarm has recovered", self.kind, step)
        if not due:
            return None
        begun = Action(curable[0], step, min(active[name] for name in curable))
        logger.warning("ACTION %s at step %d: %s since step %d", self.kind, step, begun.alarm, begun.since_step)
        return begun

    def state(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on."""
        return {"persistence": self._persistence.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        with refused_in_words("the state of what the alarm did", "Remove it, with the alarm's, to begin anew."):
            require_fields(Persistence, state["persistence"])
            self._persistence.load(state["persistence"])
