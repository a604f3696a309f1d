"""Settings of measuring and of the alarm: the block `mismatch` of a config, which every preset switches on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import settings

ON_ALARM = "mismatch.alarm.on_alarm"


@settings("mismatch.alarm.{}".format)
class AlarmSettings:
    """When the alarm is raised, and what happens then; docs/alarm.md has the measured rates of the defaults.

    Attributes:
        on_alarm: `log` (say it and go on); `stop` (say it, and end the run if the alarm is severe); `rescue` (end the
            run, and go on from before the trouble in FP16, as a run of its own).
        action_patience: Further steps in a row, or twice as many that recur, with an alarm that a rescue cures, and
            none of a fault, before it begins; ≥ 1.
        baseline_steps: First steps that say what is normal for this run; ≥ 5.
        allowed_growth: k3 may be this many times its baseline for ever; > 1. The mean |log-prob gap| goes with its
            square, because k3 ≈ gap²/2: 3 allows it a factor of 1.73.
    """

    on_alarm: Literal["log", "stop", "rescue"] = Field(
        default="log", description="The value log never ends or changes a run."
    )
    action_patience: int = Field(default=5, ge=1, strict=True)
    baseline_steps: int = Field(default=30, ge=5, strict=True)
    allowed_growth: float = Field(default=3.0, gt=1, strict=True, allow_inf_nan=False)


@settings("mismatch.{}".format)
class MismatchSettings:
    """What is measured at every step, and what is done about it.

    Attributes:
        enabled: False leaves verl's own trainer in place.
        keep_tokens: N, the responses of each step whose tokens are kept beside the metrics file; 0: none. At most 256.
        keep_text: Whether their text is kept, too.
        alarm: When to speak up.
    """

    enabled: bool = Field(default=True, strict=True)
    keep_tokens: int = Field(default=0, ge=0, le=256, strict=True)
    keep_text: bool = Field(default=True, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check that tokens are kept by a trainer that measures."""
        if self.keep_tokens and not self.enabled:
            problem = "verl's own trainer keeps none: mismatch.enabled=False leaves it in place"
            remedy = "Set mismatch.enabled=True."
            raise ConfigurationError(problem, setting="mismatch.keep_tokens", value=self.keep_tokens, remedy=remedy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MismatchSettings:
        """Return the settings in a config's block `mismatch`; what it leaves out has its default."""
        values = dict(config.get("mismatch") or {})
        return cls(**values | {"alarm": AlarmSettings(**(values.get("alarm") or {}))})
