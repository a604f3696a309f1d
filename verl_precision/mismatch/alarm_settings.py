"""Settings of the alarm, with bounds."""

import math
from dataclasses import dataclass

from verl_precision.errors import ConfigurationError

ACTIONS = ("log", "stop")


@dataclass(frozen=True)
class AlarmSettings:
    """When the alarm is raised, and what happens then; docs/alarm.md has the measured rates of the defaults.

    Attributes:
        on_alarm: `log` (say it and go on) or `stop` (say it, and end the run if the alarm is severe).
        baseline_steps: first steps that say what is normal for this run; ≥ 5.
        allowed_growth: k3 may be this many times its baseline for ever; > 1. The mean |log-prob gap| goes with its
            square, because k3 ≈ gap²/2: 3 allows it a factor of 1.73.
        evidence_steps: full steps of evidence before growth is an alarm. Higher: fewer false alarms, as many steps
            later.
        extreme_gap: |π - μ| of a single token beyond which it counts as extreme; in (0, 1]. 1 switches the check off.
        affected_fraction: share of tokens with β beyond the clip range, or phantom-clipped, that is too much;
            in (0, 1].
        persist_steps: consecutive steps before extremes, β beyond the clip range or NaN are an alarm.
        skipped_steps: consecutive steps with a skipped update before they are a storm.
        loss_scale_minimum: the scale at or below which there is no room left; the engine's `loss_scale.minimum`. 0
            switches the check off (a static scale of 1 is always there).
        sync_pearson: correlation of trainer and rollout probabilities below which they are not one policy; in [-1, 1).
        sync_gap: mean |log-prob gap|, nats, above which they are not one policy.
    """

    on_alarm: str = "log"
    baseline_steps: int = 30
    allowed_growth: float = 3.0
    evidence_steps: int = 8
    extreme_gap: float = 0.95
    affected_fraction: float = 0.01
    persist_steps: int = 5
    skipped_steps: int = 10
    loss_scale_minimum: float = 1.0
    sync_pearson: float = 0.5
    sync_gap: float = 1.0

    def __post_init__(self) -> None:
        """Check the bounds of every setting.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        if self.on_alarm not in ACTIONS:
            raise _refused("on_alarm", self.on_alarm, " or ".join(ACTIONS), "The value log never ends a run.")
        for name, least in (("baseline_steps", 5), ("evidence_steps", 1), ("persist_steps", 1), ("skipped_steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _refused(
                    name, value, f"an integer >= {least}, in training steps", "Leave it out for the default."
                )
        self._check("allowed_growth", 1, math.inf, "a finite number > 1", "2 is sensitive, 3 is the default.")
        self._check("extreme_gap", 0, 1, "in (0, 1]", "1 switches the check off.", upper_included=True)
        self._check("affected_fraction", 0, 1, "in (0, 1]", "1 switches the checks off.", upper_included=True)
        self._check("sync_pearson", -1, 1, "in [-1, 1)", "-1 switches the check off.", lower_included=True)
        self._check("sync_gap", 0, math.inf, "a positive number of nats", "Leave it out for the default.")
        self._check(
            "loss_scale_minimum",
            0,
            math.inf,
            "a finite number >= 0",
            "Set it to the engine's loss_scale.minimum; 0 switches the check off.",
            lower_included=True,
        )

    def _check(
        self,
        name: str,
        lower: float,
        upper: float,
        allowed: str,
        remedy: str,
        *,
        lower_included: bool = False,
        upper_included: bool = False,
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        inside = number and (lower < value < upper or (value == lower and lower_included))
        if not (inside or (number and value == upper and upper_included)):
            raise _refused(name, value, allowed, remedy)


def _refused(name: str, value: object, allowed: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"mismatch.alarm.{name}", value=value, allowed=allowed, remedy=remedy)
