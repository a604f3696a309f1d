"""The trainer callback of an alarm that acts, `mismatch.alarm.on_alarm` (docs/alarm.md): when, how often, and what.

A remedy wants more than an alarm: a cause that it cures, evidence for some further steps, and no alarm of a fault, of
which a change of the learning rate or of the precision would only hide the cause.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import open_dict

from verl_precision.base.state import checked, refused_in_words, require_fields
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
        self._trainer, self._settings = trainer, trainer.monitor.settings.alarm
        self.kind = self._settings.on_alarm
        self._is_rescue = is_rescue(trainer.config)
        self._begun: list[int] = []  # steps at which one began, of the last `action_steps`
        self.exhausted = False  # whether one more was due than is allowed: nothing is done any more
        self._persistence = Persistence(self._settings.action_patience)
        if self.kind in REMEDIES:
            trainer.monitor.memories["actions"] = self

    @property
    def active(self) -> bool:
        """Whether an action is under way."""
        return self._persistence.active and not self.exhausted

    def _compute_advantage(self, proceed, batch, metrics):
        with self.masking():
            return proceed(batch, metrics=metrics)

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

    @contextlib.contextmanager
    def masking(self) -> Iterator[None]:
        """Have verl's rejection, inside the block and while masked, leave out responses whose ratio is beyond C.

        1/C ≤ π/μ ≤ C is asked of whole responses (verl's `seq_sum_k1`).
        """
        if not (self.kind == "mask" and self.active):
            yield
            return
        correction = self._trainer.config.algorithm.rollout_correction
        most = self._trainer.monitor.settings.ratio_threshold
        mask = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": f"{1 / most}_{most}"}
        before = {key: correction.get(key) for key in mask}
        with open_dict(correction):
            try:
                correction.update(mask)
                yield
            finally:
                correction.update(before)

    def decide(self, step: int, active: Mapping[str, int]) -> Action | None:
        """Take the alarms that are active after a step, each with the step of its first evidence; return what begins.

        At most `max_actions` begin within `action_steps` steps; where one more is due, nothing is done any more.
        """
        if self.kind not in REMEDIES or self.exhausted:
            return None
        was_active, curable = self.active, [name for name in CURABLE if name in active]
        due = self._persistence.update(step, bool(curable) and not any(name in active for name in FAULTS))
        if not due:
            if was_active and not self.active:
                self._say(f"ended at step {step}: the alarm has recovered")
            return None
        self._begun = [each for each in self._begun if each > step - self._settings.action_steps]
        if len(self._begun) >= self._settings.max_actions:
            self.exhausted = True
            self._say(f"is due at step {step}, and max_actions allows no more: nothing is done any more")
            return None
        self._begun.append(step)
        begun = Action(curable[0], step, min(active[name] for name in curable))
        self._say(f"at step {step}: {begun.alarm} since step {begun.since_step}")
        return begun

    def _say(self, text: str) -> None:
        logger.warning("ACTION %s %s", self.kind, text)

    def state(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on."""
        return {"begun": self._begun, "exhausted": self.exhausted, "persistence": self._persistence.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        with refused_in_words("the state of what the alarm did", "Remove it, with the alarm's, to begin anew."):
            begun, exhausted = checked(list[int], state["begun"]), checked(bool, state["exhausted"])
            require_fields(Persistence, state["persistence"])
            self._persistence.load(state["persistence"])
            self._begun, self.exhausted = begun, exhausted
