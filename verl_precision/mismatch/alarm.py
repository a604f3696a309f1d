"""The alarm: fed the metrics of each step, it says when a run is on its way to collapse, and what to do.

Pure Python; verl is not needed. Method, reasons and measured rates: docs/alarm.md.

    alarm = MismatchAlarm(AlarmSettings(on_alarm="stop"))
    for step, metrics in ...:
        act_on(alarm.update(step, metrics), alarm.settings, log=logger.warning)
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_precision.base.errors import MismatchAlarmError
from verl_precision.base.state import refused_in_words, require_fields
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.drift_detector import EVERY, Growth, Persistence
from verl_precision.mismatch.remedies import ADVICE, Advice
from verl_precision.mismatch.settings import AlarmSettings

# Below these a mismatch is held to be none: |gap| of 1e-5 nats is some ten units of float32's last place at a log-prob
# of 10, and a seventh of what FP16 shows on the tiny model of the quickstart (7e-5). k3 ≈ gap²/2.
GAP_FLOOR = 1e-5
K3_FLOOR = 1e-10
# Steps in a row with NaN or infinity: one may be one broken sample, three are an engine.
NOT_FINITE_STEPS = 3
NOT_FINITE = {
    "trainer_not_finite": names.NONFINITE_TRAINER,
    "rollout_not_finite": names.NONFINITE_ROLLOUT,
    "responses_not_finite": names.NONFINITE_RESPONSES,
}


@dataclass(frozen=True)
class Alarm:
    """One finding, reported once."""

    name: str  # which check; a key of `remedies.ADVICE`
    metric: str  # name of the metric that raised it
    seen: float  # value of the metric at `step`
    normal: str  # the baseline or bound that it is compared with, in words
    step: int  # that raised it
    since_step: int  # at which it began
    advice: Advice

    def __str__(self) -> str:
        """Return it as several lines for people."""
        fixes = "\n".join(f"  {number}. {fix}" for number, fix in enumerate(self.advice.try_first, 1))
        return (
            f"ALARM {self.name} at step {self.step}, since step {self.since_step}\n"
            f"  {self.metric} = {self.seen:.3g}; {self.normal}\n"
            f"  {self.advice.meaning}\n"
            f"  Try, strongest first:\n{fixes}"
        )

    def row(self) -> dict[str, object]:
        """Return it as a row of a table."""
        said = {"step": self.step, "alarm": self.name, "metric": self.metric, "value": self.seen, "normal": self.normal}
        advice = {"meaning": self.advice.meaning, "try_first": "; ".join(self.advice.try_first)}
        return {**said, "since_step": self.since_step, **advice}


class Limit(NamedTuple):
    """A bound of one metric."""

    metric: str
    beyond: Callable[[float], bool]
    allowed: str


class Watch:
    """What raises an alarm: limits, of which any counts, and the patience that they share."""

    def __init__(self, steps: int, *limits: Limit) -> None:
        self.patience, self.limits = Persistence(steps, returns=True), limits


def _watched(s: AlarmSettings) -> dict[str, Watch]:
    """Return of each alarm what raises it, after how many measurements in a row."""
    share, gap = f"allowed up to {s.affected_fraction:g} of the tokens", f"allowed within ±{s.extreme_gap:g}"
    clipped = Limit(names.PHANTOM_CLIPPED, lambda x: x > s.affected_fraction, share)
    overflow = f"allowed in fewer than {s.skipped_steps} steps in a row, and than one in {EVERY}"
    scale = f"minimum {s.loss_scale_minimum:g}"
    apart = (
        Limit(names.PROBS_PEARSON, lambda x: x < s.sync_pearson, f"one policy has at least {s.sync_pearson:g}"),
        Limit(names.LOG_PROB_GAP, lambda x: x > s.sync_gap, f"one policy has at most {s.sync_gap:g} nats"),
    )
    few, most = f"allowed down to {s.effective_fraction:g} of the ", 1 - s.effective_fraction
    rejected = Limit(names.REJECTED_TOKENS, lambda x: x > most, f"allowed up to {most:g} of the tokens")
    # Weights of 0 and 1 have an effective sample size too: what verl's rejection keeps.
    sizes = [Limit(key, lambda x: x < s.effective_fraction, few + unit) for key, unit in names.SAMPLE_SIZES.items()]
    extremes = [Limit(key, lambda x: abs(x) > s.extreme_gap, gap) for key in (names.PROB_GAP_MIN, names.PROB_GAP_MAX)]
    return {
        **{name: Watch(NOT_FINITE_STEPS, Limit(key, lambda x: x > 0, "allowed 0")) for name, key in NOT_FINITE.items()},
        "extreme_prob_gap": Watch(s.persist_steps, *extremes),
        "phantom_clipping": Watch(s.persist_steps, clipped),
        "low_effective_sample_size": Watch(s.persist_steps, *sizes, rejected),
        "repeated_overflow": Watch(s.skipped_steps, Limit(names.SKIPPED_STEPS, lambda x: x > 0, overflow)),
        "loss_scale_at_minimum": Watch(1, Limit(names.LOSS_SCALE, lambda x: x <= s.loss_scale_minimum, scale)),
        # One step with a policy that is not the trainer's is enough to look; two rule out a batch of a few tokens.
        "policies_differ": Watch(2, *apart),
    }


class MismatchAlarm:
    """All checks of a run; remedies `in_use` by it already are not offered (`remedies.remedies_in_use`)."""

    def __init__(self, settings: AlarmSettings | None = None, in_use: Collection[str] = ()) -> None:
        self.settings = s = settings or AlarmSettings()
        self.in_use = in_use
        self._watched = _watched(s)
        self._growing = {
            "k3_growth": Growth(1, K3_FLOOR, s.baseline_steps, s.allowed_growth, s.evidence_steps),
            "gap_growth": Growth(2, GAP_FLOOR, s.baseline_steps, s.allowed_growth, s.evidence_steps),
        }

    @property
    def _detectors(self) -> dict[str, Growth | Persistence]:
        return {**self._growing, **{name: watch.patience for name, watch in self._watched.items()}}

    @property
    def active(self) -> list[str]:
        """Names of the alarms that were raised and have not recovered."""
        return list(self.active_since)

    @property
    def active_since(self) -> dict[str, int]:
        """The step at which the evidence of each active alarm began."""
        return {name: detector.since or 0 for name, detector in self._detectors.items() if detector.active}

    @property
    def baseline_missing(self) -> int:
        """Steps with a measured mismatch still wanted before growth is looked for."""
        return self.settings.baseline_steps - max(len(growth.baseline) for growth in self._growing.values())

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Take all metrics of one step, steps in order, and return the alarms raised, each once until it has recovered.

        A metric that is missing or NaN changes nothing. Growth is looked for in the responses of the current version
        alone, where there are others. While an action masks responses, the effective sample is that before the mask.
        """
        raised = []
        if metrics.get(names.acting("mask")):
            metrics = names.before_mask(metrics)
        for (name, growth), metric in zip(self._growing.items(), (names.K3_KL, names.LOG_PROB_GAP), strict=True):
            value = names.of_current_version(metrics, metric)
            if value is not None and growth.update(step, value):
                raised.append(self._alarm(name, metric, value, growth.normal(), step, growth))
        for name, watch in self._watched.items():
            values = ((names.value_of(metrics, limit.metric), limit) for limit in watch.limits)
            found = [(limit.beyond(x), x, limit) for x, limit in values if x is not None and not math.isnan(x)]
            if found:
                beyond, value, limit = max(found, key=lambda item: item[0])  # the first beyond, or else the first
                if watch.patience.update(step, beyond):
                    raised.append(self._alarm(name, limit.metric, value, limit.allowed, step, watch.patience))
        return raised

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON from which a resumed run goes on: baselines, evidence, what was reported."""
        return {name: detector.state() for name, detector in self._detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; one that cannot be read raises `CheckpointStateError`, and nothing is changed."""
        fresh = MismatchAlarm(self.settings)
        with refused_in_words("the state of the mismatch alarm", "Remove it to begin with a new baseline."):
            for name, detector in fresh._detectors.items():
                require_fields(type(detector), state[name])
                detector.load(state[name])
        self._growing, self._watched = fresh._growing, fresh._watched

    def _alarm(
        self, name: str, metric: str, seen: float, normal: str, step: int, detector: Growth | Persistence
    ) -> Alarm:
        began = step if detector.since is None else detector.since
        return Alarm(name, metric, seen, normal, step, began, ADVICE[name].without(self.in_use))


def first_alarms(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the alarms of a recorded run, given the metrics of its steps, each with "step": name -> first step."""
    alarm, first = MismatchAlarm(), dict[str, int]()
    for row in rows:
        for raised in alarm.update(int(row["step"]), row):
            first.setdefault(raised.name, raised.step)
    return first


def act_on(alarms: list[Alarm], settings: AlarmSettings, log: Callable[[str], object]) -> None:
    """Say each alarm of a step, the last words of the run included; end the run if it is to end.

    Raises:
        MismatchAlarmError: With `on_alarm=stop`, if an alarm is severe.
    """
    for alarm in alarms:
        log(str(alarm))
    severe = [alarm for alarm in alarms if alarm.advice.severe]
    if severe and settings.on_alarm == "stop":
        raise MismatchAlarmError(
            "\n".join(map(str, severe)) + "\nmismatch.alarm.on_alarm='stop' ends the run here",
            allowed="log or stop",
            remedy="Apply one of the fixes above, or set on_alarm=log to go on regardless.",
        )
