"""Settings of the measurement and of the alarm: the block `mismatch` of a config, which every preset switches on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import settings

ON_ALARM = "mismatch.alarm.on_alarm"


@settings("mismatch.alarm.{}".format)
class AlarmSettings:
    """Settings of the alarm; docs/alarm.md has the measured rates of the defaults.

    Attributes:
        on_alarm: `log` (only log); `stop` (log, and end the run if the alarm is severe); `rescue` (end the
            run, and resume in FP16 from before the alarm's evidence, as a new run).
        action_patience: A rescue begins after this many steps in a row (or twice as many that recur) with an alarm
            that a rescue can cure, and without an alarm about a fault; ≥ 1.
        baseline_steps: Number of first steps that give the run's baseline; ≥ 5.
        allowed_growth: k3 may stay at this many times its baseline; > 1. The mean |log-prob gap| may grow by the
            root of this factor, because k3 ≈ gap²/2: 3 allows a factor of 1.73.
    """

    on_alarm: Literal["log", "stop", "rescue"] = Field(default="log", description="Use log; it only reports.")
    action_patience: int = Field(default=5, ge=1, strict=True)
    baseline_steps: int = Field(default=30, ge=5, strict=True)
    allowed_growth: float = Field(default=3.0, gt=1, strict=True, allow_inf_nan=False)


@settings("mismatch.{}".format)
class MismatchSettings:
    """Settings of the measurement at every step, and of the alarm.

    Attributes:
        enabled: False keeps verl's own trainer.
        keep_tokens: Number of responses of each step whose tokens are kept beside the metrics file; 0 to 256.
        keep_text: Whether the text of these responses is kept, too.
        self_gap_every_n_steps: The trainer scores a few responses twice, together and one by one, in the first two
            steps and in every n-th step; 0: in the first two only.
        alarm: Settings of the alarm.
    """

    enabled: bool = Field(default=True, strict=True)
    keep_tokens: int = Field(default=0, ge=0, le=256, strict=True)
    keep_text: bool = Field(default=True, strict=True)
    self_gap_every_n_steps: int = Field(default=0, ge=0, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check that tokens are kept by a trainer that measures."""
        if self.keep_tokens and not self.enabled:
            problem = "verl's own trainer keeps no tokens, and mismatch.enabled=False keeps that trainer"
            remedy = "Set mismatch.enabled=True."
            raise ConfigurationError(problem, setting="mismatch.keep_tokens", value=self.keep_tokens, remedy=remedy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MismatchSettings:
        """Return the settings in a config's block `mismatch`; missing settings have their defaults."""
        values = dict(config.get("mismatch") or {})
        return cls(**values | {"alarm": AlarmSettings(**(values.get("alarm") or {}))})
