"""What an alarm that acts does to a run, at each point of a step: `mismatch.alarm.on_alarm` (docs/alarm.md)."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, open_dict

from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.tools.actions.actions import KINDS, Action, AlarmActions
from verl_precision.tools.actions.learning_rate import LOWER_RATE
from verl_precision.tools.actions.rescue import is_rescue

logger = logging.getLogger("verl_precision.mismatch")


class Acting:
    """Decides at the end of a step, and acts in the next ones."""

    def __init__(self, config: DictConfig, settings: MismatchSettings) -> None:
        """Read the kind of the action; a rescue is under way in the run that it began."""
        self._kind, self._threshold = settings.alarm.on_alarm, settings.ratio_threshold
        self._actions = AlarmActions(settings.alarm) if self._kind in KINDS else None
        self._is_rescue = is_rescue(config)
        self.begun: Action | None = None  # by the last step

    def under_way(self, kind: str) -> bool:
        """Return whether a kind of action is under way in this step."""
        acts = self._kind == kind and self._actions is not None and self._actions.active
        return self._is_rescue if kind == "rescue" else acts

    def metrics(self) -> dict[str, int]:
        """Return `alarm/<kind>` of this step: 1 while the action is under way; empty for a run that has none."""
        kind = "rescue" if self._is_rescue else self._kind
        return {names.acting(kind): int(self.under_way(kind))} if kind in KINDS else {}

    @contextlib.contextmanager
    def masking(self, config: DictConfig) -> Iterator[bool]:
        """Have verl's rejection, inside the block and while masked, leave out responses whose ratio is beyond C.

        Yields:
            Whether it does: 1/C ≤ π/μ ≤ C is asked of whole responses (verl's `seq_sum_k1`).
        """
        if not self.under_way("mask"):
            yield False
            return
        correction, bounds = config.algorithm.rollout_correction, f"{1 / self._threshold}_{self._threshold}"
        mask = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": bounds}
        before = {key: correction.get(key) for key in mask}
        with open_dict(correction):
            try:
                correction.update(mask)
                yield True
            finally:
                correction.update(before)

    def ask_the_worker(self, batch: Any) -> None:
        """Have the next update take a lower rate, while that is under way."""
        if self.under_way("lower_learning_rate"):
            batch.extra_info[LOWER_RATE] = True

    def judge(self, step: int, active: Mapping[str, int]) -> None:
        """Take the alarms that are active after a step, and say what begins and what ends."""
        if self._actions is None:
            return
        had, exhausted = self._actions.active, self._actions.exhausted
        self.begun = self._actions.update(step, active)
        if self.begun is not None:
            text = f"at step {step}: {self.begun.alarm} since step {self.begun.since_step}"
        elif self._actions.exhausted and not exhausted:
            text = f"is due at step {step}, and max_actions allows no more: nothing is done any more"
        elif had and not self._actions.active:
            text = f"ended at step {step}: the alarm has recovered"
        else:
            return
        logger.warning("ACTION %s %s", self._kind, text)

    def state(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on; empty for a run that does not act."""
        return {} if self._actions is None else {"actions": self._actions.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned, among other things."""
        if self._actions is not None and "actions" in state:
            self._actions.load(state["actions"])
