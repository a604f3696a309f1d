"""The alarm: fed the metrics of each step, it says when a run is on its way to collapse, and what to do.

Pure Python; verl is not needed. Method, reasons and measured rates: docs/alarm.md.

    alarm = MismatchAlarm(AlarmSettings(on_alarm="stop"))
    for step, metrics in ...:
        act_on(alarm.update(step, metrics), alarm.settings, log=logger.warning)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_precision.errors import CheckpointStateError, MismatchAlarmError
from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm_settings import AlarmSettings
from verl_precision.mismatch.drift_detector import Growth, Persistence
from verl_precision.mismatch.remedies import ADVICE

# Below these a mismatch is held to be none: |gap| of 1e-5 nats is some ten units of float32's last place at a log-prob
# of 10, and a seventh of what FP16 shows on the tiny model of the quickstart (7e-5). k3 ≈ gap²/2.
GAP_FLOOR = 1e-5
K3_FLOOR = 1e-10


@dataclass(frozen=True)
class Alarm:
    """One finding, reported once.

    Attributes:
        name: which check; a key of `remedies.ADVICE`.
        metric: key of the metric that raised it.
        seen: its value at the step that raised it.
        normal: what it is compared with, in words.
        step: the step that raised it.
        since_step: the step at which it began.
        meaning: what it says of the run.
        try_first: fixes, strongest first.
        severe: whether `on_alarm=stop` ends the run.
    """

    name: str
    metric: str
    seen: float
    normal: str
    step: int
    since_step: int
    meaning: str
    try_first: list[str]
    severe: bool

    def __str__(self) -> str:
        """Return it as several lines for people."""
        fixes = "\n".join(f"  {number}. {fix}" for number, fix in enumerate(self.try_first, 1))
        return (
            f"ALARM {self.name} at step {self.step}, since step {self.since_step}\n"
            f"  {self.metric} = {self.seen:.3g}; {self.normal}\n"
            f"  {self.meaning}\n"
            f"  Try, strongest first:\n{fixes}"
        )


class MismatchAlarm:
    """All checks of a run.

    Attributes:
        settings: thresholds and sensitivity.
    """

    def __init__(self, settings: AlarmSettings | None = None) -> None:
        self.settings = s = settings or AlarmSettings()

        self._k3 = Growth(1, K3_FLOOR, s.baseline_steps, s.allowed_growth, s.evidence_steps)
        self._gap = Growth(2, GAP_FLOOR, s.baseline_steps, s.allowed_growth, s.evidence_steps)
        # One step with a policy that is not the trainer's is enough to look; two rule out a batch of a few tokens.
        self._persistent = {
            "mismatch_not_finite": Persistence(s.persist_steps),
            "extreme_prob_gap": Persistence(s.persist_steps),
            "beta_beyond_clip": Persistence(s.persist_steps),
            "phantom_clipping": Persistence(s.persist_steps),
            "skipped_step_storm": Persistence(s.skipped_steps),
            "loss_scale_at_minimum": Persistence(1),
            "policies_differ": Persistence(2),
        }

    @property
    def active(self) -> list[str]:
        """Names of the alarms that were raised and have not recovered."""
        growing = {"k3_growth": self._k3.active, "gap_growth": self._gap.active}
        growing.update({name: check.active for name, check in self._persistent.items()})
        return [name for name, active in growing.items() if active]

    @property
    def baseline_missing(self) -> int:
        """Steps with a measured mismatch still wanted before growth is looked for."""
        return self.settings.baseline_steps - max(len(self._k3.baseline), len(self._gap.baseline))

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Take the metrics of one step.

        Args:
            step: the training step; one call for each, in order.
            metrics: whatever the run logs. A metric that is missing, or NaN where NaN is not itself the finding,
                changes nothing.

        Returns:
            The alarms raised by this step, which is seldom more than one; each until it has recovered only once.
        """
        return [*self._growth(step, metrics), *self._mismatch(step, metrics), *self._optimizer(step, metrics)]

    def _growth(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        raised = []
        for name, key, detector in (
            ("k3_growth", keys.K3_KL, self._k3),
            ("gap_growth", keys.LOG_PROB_GAP, self._gap),
        ):
            value = keys.value_of(metrics, key)
            if value is not None and detector.update(step, value):
                centre, tolerance = detector.reference()
                usual, allowed = (math.exp(x / detector.power) for x in (centre, centre + tolerance))
                normal = (
                    f"baseline of the first {self.settings.baseline_steps} steps {usual:.3g}, allowed {allowed:.3g}"
                )
                raised.append(_alarm(name, key, value, normal, step, detector.since))
        return raised

    def _mismatch(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        s = self.settings
        raised = []
        gap = keys.value_of(metrics, keys.LOG_PROB_GAP)
        if gap is not None:
            raised += self._persist(
                "mismatch_not_finite", keys.LOG_PROB_GAP, gap, not math.isfinite(gap), step, "finite"
            )
        extremes = [(key, keys.value_of(metrics, key)) for key in (keys.PROB_GAP_MIN, keys.PROB_GAP_MAX)]
        measured = [(key, value) for key, value in extremes if value is not None and not math.isnan(value)]
        if measured:
            key, value = max(measured, key=lambda item: abs(item[1]))
            normal = f"allowed within ±{s.extreme_gap:g}"
            raised += self._persist("extreme_prob_gap", key, value, abs(value) > s.extreme_gap, step, normal)
        for name, key in (("beta_beyond_clip", keys.BETA_BEYOND_CLIP), ("phantom_clipping", keys.PHANTOM)):
            share = keys.value_of(metrics, key)
            if share is not None and not math.isnan(share):
                normal = f"allowed up to {s.affected_fraction:g} of the tokens"
                raised += self._persist(name, key, share, share > s.affected_fraction, step, normal)
        return raised + self._same_policy(step, metrics, gap)

    def _same_policy(self, step: int, metrics: Mapping[str, object], gap: float | None) -> list[Alarm]:
        s = self.settings
        pearson = keys.value_of(metrics, keys.PROBS_PEARSON)
        uncorrelated = pearson is not None and pearson < s.sync_pearson
        apart = gap is not None and gap > s.sync_gap
        if all(value is None or math.isnan(value) for value in (pearson, gap)):
            return []
        if uncorrelated or gap is None:
            key, value, normal = keys.PROBS_PEARSON, pearson, f"one policy has at least {s.sync_pearson:g}"
        else:
            key, value, normal = keys.LOG_PROB_GAP, gap, f"one policy has at most {s.sync_gap:g} nats"
        assert value is not None
        return self._persist("policies_differ", key, value, uncorrelated or apart, step, normal)

    def _optimizer(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        s = self.settings
        raised = []
        skipped = keys.value_of(metrics, keys.SKIPPED_STEPS)
        if skipped is not None:
            normal = f"skipped updates in {s.skipped_steps} steps in a row"
            raised += self._persist("skipped_step_storm", keys.SKIPPED_STEPS, skipped, skipped > 0, step, normal)
        scale = keys.value_of(metrics, keys.LOSS_SCALE)
        if scale is not None:
            normal = f"minimum {s.loss_scale_minimum:g}"
            at_minimum = scale <= s.loss_scale_minimum
            raised += self._persist("loss_scale_at_minimum", keys.LOSS_SCALE, scale, at_minimum, step, normal)
        return raised

    def _persist(self, name: str, key: str, value: float, holds: bool, step: int, normal: str) -> list[Alarm]:
        check = self._persistent[name]
        return [_alarm(name, key, value, normal, step, check.since)] if check.update(step, holds) else []

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on: baselines, evidence, what was reported."""
        persistent = {name: check.state() for name, check in self._persistent.items()}
        return {"k3_growth": self._k3.state(), "gap_growth": self._gap.state(), **persistent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            CheckpointStateError: if it is not one of this class; nothing is changed then.
        """
        fresh = MismatchAlarm(self.settings)
        checks: dict[str, Growth | Persistence] = {"k3_growth": fresh._k3, "gap_growth": fresh._gap}
        checks.update(fresh._persistent)
        try:
            for name, check in checks.items():
                check.load(state[name])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointStateError(
                f"the state of the mismatch alarm cannot be read ({error!r})",
                allowed="what state_dict() returned",
                remedy="Remove it to begin with a new baseline.",
            ) from error
        self._k3, self._gap, self._persistent = fresh._k3, fresh._gap, fresh._persistent


def _alarm(name: str, metric: str, seen: float, normal: str, step: int, since: int | None) -> Alarm:
    advice = ADVICE[name]
    began = step if since is None else since
    return Alarm(name, metric, seen, normal, step, began, advice.meaning, list(advice.try_first), advice.severe)


def act_on(alarms: list[Alarm], settings: AlarmSettings, log: Callable[[str], object]) -> None:
    """Say each alarm; end the run if it is to end.

    Args:
        alarms: of this step.
        settings: `on_alarm` decides.
        log: called with the text of each alarm, the last words of the run included.

    Raises:
        MismatchAlarmError: with `on_alarm=stop`, if an alarm is severe.
    """
    for alarm in alarms:
        log(str(alarm))
    severe = [alarm for alarm in alarms if alarm.severe]
    if severe and settings.on_alarm == "stop":
        raise MismatchAlarmError(
            "\n".join(map(str, severe)) + "\nmismatch.alarm.on_alarm='stop' ends the run here",
            allowed="log or stop",
            remedy="Apply one of the fixes above, or set on_alarm=log to go on regardless.",
        )
