"""When the alarm acts, and how often: `mismatch.alarm.on_alarm` other than log and stop. Pure Python.

An action wants more than an alarm: a cause that it cures, evidence for some further steps, and no alarm of a fault, of
which a change of the learning rate or of the precision would only hide the cause.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_precision.base.state import refused_in_words, require_fields
from verl_precision.mismatch.drift_detector import Persistence
from verl_precision.mismatch.settings import AlarmSettings

KINDS = ("lower_learning_rate", "mask", "rescue")  # values of `on_alarm`
# What a smaller gap cures; and alarms of a fault, beside which nothing is done.
CURABLE: tuple[str, ...] = ("low_effective_sample_size", "k3_growth", "gap_growth", "phantom_clipping")
FAULTS: tuple[str, ...] = ("trainer_not_finite", "rollout_not_finite", "responses_not_finite", "policies_differ")
FAULTS += ("repeated_overflow", "loss_scale_at_minimum")


class Action(NamedTuple):
    """What begins at a step."""

    kind: str  # a value of `on_alarm`
    alarm: str  # the first active one that it is for
    step: int
    since_step: int  # at which the evidence of its alarm began


@dataclass
class AlarmActions:
    """Decides, once a step, whether an action begins or ends."""

    settings: AlarmSettings
    begun: list[int] = field(default_factory=list)  # steps at which one began, of the last `action_steps`
    exhausted: bool = False  # whether one more was due than is allowed: nothing is done any more

    def __post_init__(self) -> None:
        """Begin without evidence."""
        self._persistence = Persistence(self.settings.action_patience)

    @property
    def active(self) -> bool:
        """Whether an action is under way."""
        return self._persistence.active and not self.exhausted

    def update(self, step: int, active: Mapping[str, int]) -> Action | None:
        """Take the alarms that are active after a step, each with the step at which it began; return what begins.

        At most `max_actions` begin within `action_steps` steps; where one more is due, nothing is done any more.
        """
        curable = [name for name in CURABLE if name in active]
        due = self._persistence.update(step, bool(curable) and not any(name in active for name in FAULTS))
        if not due or self.exhausted:
            return None
        self.begun = [each for each in self.begun if each > step - self.settings.action_steps]
        if len(self.begun) >= self.settings.max_actions:
            self.exhausted = True
            return None
        self.begun.append(step)
        return Action(self.settings.on_alarm, curable[0], step, min(active[name] for name in curable))

    def state(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on."""
        return {"begun": self.begun, "exhausted": self.exhausted, "persistence": self._persistence.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        with refused_in_words("the state of what the alarm did", "Remove it, with the alarm's, to begin anew."):
            own = {name: state[name] for name in ("begun", "exhausted")}
            require_fields(AlarmActions, own)
            require_fields(Persistence, state["persistence"])
            self._persistence.load(state["persistence"])
            self.begun, self.exhausted = [*own["begun"]], own["exhausted"]
