"""The alarm: from the metrics of each step it warns before a run collapses, and names remedies.

Pure Python; verl is not needed. Method, reasons and measured rates: docs/alarm.md.

    alarm = MismatchAlarm(AlarmSettings(on_alarm="stop"))
    for step, metrics in ...:
        act_on(alarm.update(step, metrics), alarm.settings, log=logger.warning)
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from verl_precision.base.errors import MismatchAlarmError
from verl_precision.base.files import table_of
from verl_precision.base.state import refused_in_words, require_fields
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.drift_detector import EVERY, Growth, Persistence
from verl_precision.mismatch.settings import AlarmSettings

# A smaller mismatch counts as none: |gap| of 1e-5 nats is about ten units in float32's last place at a log-prob of 10,
# and a seventh of FP16's gap on the tiny model of the quickstart (7e-5). k3 ≈ gap²/2.
GAP_FLOOR = 1e-5
K3_FLOOR = 1e-10
EVIDENCE_STEPS = 8  # full steps of growth; more steps give fewer false alarms, but each alarm comes later
EXTREME_GAP = 0.95  # |π - μ| of a single token
MOST_CLIPPED = 0.01  # share of phantom-clipped tokens
FEWEST = 0.2  # least effective sample size, or kept share; below, too few responses (or tokens) give the gradient
MOST_SILENT = 0.99  # share of the responses without an advantage, or a gradient; above, the batch teaches nothing
FEWEST_ACCEPTED = 0.3  # least share of the drafted tokens; below, drafts cost about as much as they save, or more
MOST_NOISE = 0.5  # part of a teacher's squared signal that the student's own two engines make; above, most is noise
# The gap between two packings: at most 2 gaps to the rollout if both are as near to it; and 0.1 nats is half
# of PPO's clip range, for a policy that did not change.
SELF_RATIO, SELF_GAP = 2.0, 0.1
SYNC_PEARSON, SYNC_GAP = 0.5, 1.0  # bounds with one policy: correlation of probabilities, and mean |gap| in nats
NOT_FINITE = {
    "trainer_not_finite": names.NONFINITE_TRAINER,
    "rollout_not_finite": names.NONFINITE_ROLLOUT,
    "responses_not_finite": names.NONFINITE_RESPONSES,
}
# Measurements in a row until an alarm is raised. One NaN may be one broken sample; three in a row point to an engine.
# One step with another policy than the trainer's is suspicious; two exclude that the batch had only a few tokens.
PATIENCE = {
    **dict.fromkeys(NOT_FINITE, 3),
    **dict.fromkeys(("extreme_prob_gap", "phantom_clipping", "low_effective_sample_size", "draft_rejected"), 5),
    **{"repeated_overflow": 10, "loss_scale_at_minimum": 1, "policies_differ": 2},
    **{"no_signal": 10, "teacher_is_noise": 10, "trainer_disagrees_with_itself": 2},
}
_KNOWN = table_of(__file__, "remedies.yaml")
CAUSES: dict[str, list[str]] = _KNOWN["causes"]  # alarms of one cause, the gravest first


@dataclass(frozen=True)
class Advice:
    """The advice that one alarm gives."""

    meaning: str  # the meaning for the run
    try_first: tuple[str, ...]  # strongest fix first
    severe: bool  # `on_alarm=stop` ends the run: the gradient is wrong, or there is none
    mistake: str = ""  # the common mistake at this alarm

    def without(self, in_use: Collection[str]) -> Self:
        """Return the advice without the remedies that the run already uses."""
        return replace(self, try_first=tuple(remedy for remedy in self.try_first if remedy not in in_use))


ADVICE = {
    name: Advice(**{**one, "try_first": tuple(one["try_first"]), "mistake": _KNOWN["mistakes"].get(name, "")})
    for name, one in _KNOWN["advice"].items()
}


def remedies_in_use(train: str, rollout: str, weighs_sequences: bool, verifies_syncs: bool) -> frozenset[str]:
    """Return the remedies that a run already uses; dtypes of trainer and rollout are bf16, fp16 or fp32."""
    has = {
        "match_precisions": train == rollout != "bf16",
        "train_bf16": train == "bf16",
        "sample_bf16": rollout == "bf16",
        "weigh_sequences": weighs_sequences,
        "verify_syncs": verifies_syncs,
    }
    return frozenset(_KNOWN["remedies"][name] for name, on in has.items() if on)


@dataclass(frozen=True)
class Alarm:
    """One finding, reported once."""

    name: str  # which check; a key of `ADVICE`
    metric: str  # name of the metric that raised it
    seen: float  # value of the metric at `step`
    normal: str  # the baseline or bound that it is compared with, in words
    step: int  # the step that raised it
    since_step: int  # the step at which it began
    advice: Advice

    def __str__(self) -> str:
        """Return the alarm as several lines of text."""
        lines = [f"ALARM {self.name} at step {self.step}, since step {self.since_step}"]
        lines += [f"  {self.metric} = {self.seen:.3g}; {self.normal}", f"  {self.advice.meaning}"]
        lines += ["  Try, strongest first:", *(f"  {i}. {fix}" for i, fix in enumerate(self.advice.try_first, 1))]
        return "\n".join(lines)


class Limit(NamedTuple):
    """A bound of one metric."""

    metric: str
    beyond: Callable[[float], bool]
    allowed: str


_SELDOM = f"allowed in fewer than {PATIENCE['repeated_overflow']} steps in a row, and in less than one in {EVERY}"
# One limit is enough for an alarm. verl's rejection sets weights of 0 and 1: the kept share is their sample size.
LIMITS: dict[str, list[Limit]] = {
    **{name: [Limit(key, lambda x: x > 0, "allowed 0")] for name, key in NOT_FINITE.items()},
    "extreme_prob_gap": [
        Limit(key, lambda x: abs(x) > EXTREME_GAP, f"allowed within ±{EXTREME_GAP:g}")
        for key in (names.PROB_GAP_MIN, names.PROB_GAP_MAX)
    ],
    "phantom_clipping": [
        Limit(names.PHANTOM_CLIPPED, lambda x: x > MOST_CLIPPED, f"allowed up to {MOST_CLIPPED:g} of the tokens")
    ],
    "low_effective_sample_size": [
        *(
            Limit(key, lambda x: x < FEWEST, f"allowed down to {FEWEST:g} of the {unit}")
            for key, unit in names.SAMPLE_SIZES.items()
        ),
        Limit(names.REJECTED_TOKENS, lambda x: x > 1 - FEWEST, f"allowed up to {1 - FEWEST:g} of the tokens"),
    ],
    "repeated_overflow": [Limit(names.SKIPPED_STEPS, lambda x: x > 0, _SELDOM)],
    "loss_scale_at_minimum": [Limit(names.LOSS_SCALE, lambda x: x <= 1, "minimum 1")],
    "policies_differ": [
        Limit(names.PROBS_PEARSON, lambda x: x < SYNC_PEARSON, f"one policy has at least {SYNC_PEARSON:g}"),
        Limit(names.LOG_PROB_GAP, lambda x: x > SYNC_GAP, f"one policy has at most {SYNC_GAP:g} nats"),
    ],
    "no_signal": [Limit(key, lambda x: x > MOST_SILENT, "allowed up to 0.99 of the responses") for key in names.SILENT],
    "draft_rejected": [Limit(names.DRAFT_ACCEPTANCE, lambda x: x < FEWEST_ACCEPTED, f"at least {FEWEST_ACCEPTED:g}")],
    "teacher_is_noise": [Limit(names.NOISE_SHARE, lambda x: x > MOST_NOISE, f"allowed up to {MOST_NOISE:g}")],
    "trainer_disagrees_with_itself": [
        Limit(names.SELF_GAP_RATIO, lambda x: x > SELF_RATIO, f"allowed up to {SELF_RATIO:g} gaps to the rollout"),
        Limit(names.SELF_GAP, lambda x: x > SELF_GAP, f"allowed up to {SELF_GAP:g} nats"),
    ],
}


class MismatchAlarm:
    """All checks of a run; remedies that the run already uses (`in_use`, of `remedies_in_use`) are not suggested."""

    def __init__(self, settings: AlarmSettings | None = None, in_use: Collection[str] = ()) -> None:
        self.settings, self.in_use = (s := settings or AlarmSettings()), in_use
        self._growing = {
            "k3_growth": Growth(1, K3_FLOOR, s.baseline_steps, s.allowed_growth, EVIDENCE_STEPS),
            "gap_growth": Growth(2, GAP_FLOOR, s.baseline_steps, s.allowed_growth, EVIDENCE_STEPS),
        }
        self._patience = {name: Persistence(steps) for name, steps in PATIENCE.items()}

    @property
    def _detectors(self) -> dict[str, Growth | Persistence]:
        return {**self._growing, **self._patience}

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
        """Number of measured steps that the baseline still needs."""
        return self.settings.baseline_steps - max(len(growth.baseline) for growth in self._growing.values())

    @property
    def allowed(self) -> dict[str, float]:
        """The largest value that is no growth, of each metric whose baseline is complete."""
        growing = zip((names.K3_KL, names.LOG_PROB_GAP), self._growing.values(), strict=True)
        return {metric: each.allowed()[1] for metric, each in growing if len(each.baseline) == each.baseline_steps}

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Take all metrics of one step, in the order of steps; return new alarms, each once until it has recovered.

        A metric that is missing or NaN changes nothing. Growth is judged on the responses of the current version
        only, if there are responses of older versions.
        """
        raised = []
        for (name, growth), metric in zip(self._growing.items(), (names.K3_KL, names.LOG_PROB_GAP), strict=True):
            value = names.of_current_version(metrics, metric)
            if value is not None and growth.update(step, value):
                raised.append(self._alarm(name, metric, value, growth.normal(), step, growth))
        for name, patience in self._patience.items():
            values = ((names.value_of(metrics, limit.metric), limit) for limit in LIMITS[name])
            found = [(limit.beyond(x), x, limit) for x, limit in values if x is not None and not math.isnan(x)]
            if found:
                beyond, value, limit = max(found, key=lambda item: item[0])  # the first beyond its limit, or the first
                if patience.update(step, beyond):
                    raised.append(self._alarm(name, limit.metric, value, limit.allowed, step, patience))
        return raised

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON for a resumed run: baselines, evidence, reported alarms."""
        return {name: detector.state() for name, detector in self._detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. An unreadable state raises `CheckpointStateError` and changes nothing."""
        fresh = MismatchAlarm(self.settings)
        with refused_in_words("the state of the mismatch alarm", "Remove it to start with a new baseline."):
            for name, detector in fresh._detectors.items():
                require_fields(type(detector), state[name])
                detector.load(state[name])
        self._growing, self._patience = fresh._growing, fresh._patience

    def _alarm(self, name: str, metric: str, seen: float, normal: str, step: int, by: Growth | Persistence) -> Alarm:
        began = step if by.since is None else by.since
        return Alarm(name, metric, seen, normal, step, began, ADVICE[name].without(self.in_use))


def act_on(alarms: list[Alarm], settings: AlarmSettings, log: Callable[[str], object]) -> None:
    """Log each alarm of a step; with `on_alarm=stop`, raise `MismatchAlarmError` if one is severe."""
    for alarm in alarms:
        log(str(alarm))
    severe = [alarm for alarm in alarms if alarm.advice.severe]
    if severe and settings.on_alarm == "stop":
        raise MismatchAlarmError(
            "\n".join(map(str, severe)) + "\nmismatch.alarm.on_alarm='stop' ends the run at this step",
            allowed="log, stop or rescue",
            remedy="Apply one of the fixes above, or set on_alarm=log to continue anyway.",
        )
