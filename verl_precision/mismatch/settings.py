"""Settings of the measurement and of the alarm: the block `mismatch` of a config, which every preset switches on."""

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import settings

ON_ALARM = "mismatch.alarm.on_alarm"
LOGGERS_WITH_ALERTS = ("wandb", "trackio")
URL = re.compile(r"https?://[\w.-]+(:\d+)?(/\S*)?", re.ASCII)


@settings("mismatch.alarm.notify.{}".format)
class NotifySettings:
    """Whom an alarm reaches beside the log; docs/operators.md.

    Attributes:
        webhook_env: Name of an environment variable with the URL of a webhook. verl prints its config, and sends it
            to its loggers, so the config cannot hold the URL.
        command: A program with arguments; it gets the alarm as JSON on its standard input, and runs without a shell.
        logger: Whether wandb or trackio, where `trainer.logger` has them, send their own alert.
    """

    webhook_env: str | None = None
    command: str | None = None
    logger: bool = Field(default=False, strict=True)

    def __post_init__(self) -> None:
        """Check that the variable has a URL; no error contains it."""
        name, setting = self.webhook_env, "mismatch.alarm.notify.webhook_env"
        if name is not None and not URL.fullmatch(os.environ.get(name, "")):
            problem = "this process has no such environment variable, or it has no http:// or https:// URL"
            remedy, value = "export ALARM_WEBHOOK=URL, and give the name.", name if name.isidentifier() else "(hidden)"
            raise ConfigurationError(problem, setting=setting, value=value, remedy=remedy)


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
        notify: Whom an alarm reaches beside the log.
    """

    on_alarm: Literal["log", "stop", "rescue"] = Field(default="log", description="Use log; it only reports.")
    action_patience: int = Field(default=5, ge=1, strict=True)
    baseline_steps: int = Field(default=30, ge=5, strict=True)
    allowed_growth: float = Field(default=3.0, gt=1, strict=True, allow_inf_nan=False)
    notify: NotifySettings = NotifySettings()


@settings("mismatch.{}".format)
class MismatchSettings:
    """Settings of the measurement at every step, and of the alarm.

    Attributes:
        enabled: False keeps verl's own trainer.
        keep_tokens: Number of responses of each step whose tokens are kept beside the metrics file; 0 to 256.
        keep_text: Whether the text of these responses is kept, too.
        self_gap_every_n_steps: The trainer scores a few responses twice, together and one by one, in the first two
            steps and in every n-th step; 0: in the first two only.
        prometheus: Whether the metrics of each step are exported through Ray, for Prometheus; docs/operators.md.
        alarm: Settings of the alarm.
    """

    enabled: bool = Field(default=True, strict=True)
    keep_tokens: int = Field(default=0, ge=0, le=256, strict=True)
    keep_text: bool = Field(default=True, strict=True)
    self_gap_every_n_steps: int = Field(default=0, ge=0, strict=True)
    prometheus: bool = Field(default=False, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check that verl's own trainer is not asked for what only a trainer that measures does."""
        notify = self.alarm.notify if self.alarm.notify != NotifySettings() else None
        asked = {"keep_tokens": self.keep_tokens, "prometheus": self.prometheus, "alarm.notify": notify}
        for name in [] if self.enabled else filter(asked.get, asked):
            problem = "verl's own trainer does not do this, and mismatch.enabled=False keeps that trainer"
            remedy = "Set mismatch.enabled=True."
            raise ConfigurationError(problem, setting=f"mismatch.{name}", value=asked[name], remedy=remedy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings in a config's block `mismatch`; missing settings have their defaults."""
        values = dict(config.get("mismatch") or {})
        alarm = dict(values.get("alarm") or {})
        notify = NotifySettings(**(alarm.get("notify") or {}))
        if notify.logger and not any(name in str(config["trainer"]["logger"]) for name in LOGGERS_WITH_ALERTS):
            remedy, setting = "Add wandb or trackio to trainer.logger.", "mismatch.alarm.notify.logger"
            raise ConfigurationError("this run's loggers have no alerts", setting=setting, value=True, remedy=remedy)
        return cls(**values | {"alarm": AlarmSettings(**alarm | {"notify": notify})})
