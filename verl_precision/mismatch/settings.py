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
        action_patience: A rescue begins after this many further steps in a row with an alarm that a rescue can
            cure, and without an alarm of a fault; ≥ 1.
        baseline_steps: Number of first steps that give the run's baseline; ≥ 5.
        allowed_growth: k3 may stay at this many times its baseline; > 1. The mean |log-prob gap| may grow by its
            root, because k3 ≈ gap²/2: 3 allows a factor of 1.73.
        evidence_steps: Steps of evidence before growth raises an alarm. Higher: fewer false alarms, as many steps
            later. Interrupted growth also counts, over twice as many steps with the symptom in every fourth or more.
        extreme_gap: A token is extreme if its |π - μ| is larger than this; in (0, 1]. 1 switches the check off.
        affected_fraction: Largest allowed share of phantom-clipped tokens; in (0, 1]. 1 switches the check off.
        effective_fraction: Smallest allowed effective sample size of weights, or after verl's rejection, as a share
            of the responses (of the tokens, if tokens have weights); in [0, 1). 0 switches the check off.
        persist_steps: Consecutive steps before extremes, phantom clipping or a small effective sample are an alarm.
        skipped_steps: Consecutive steps with a skipped update before that is an alarm.
        loss_scale_minimum: Alarm at or below this loss scale. 0 switches the check off (for a static scale of 1).
        sync_pearson: Alarm if the correlation of trainer and rollout probabilities is below this; in [-1, 1).
        sync_gap: Alarm if the mean |log-prob gap|, in nats, is above this.
    """

    on_alarm: Literal["log", "stop", "rescue"] = Field(default="log", description="Use log; it only reports.")
    action_patience: int = Field(default=5, ge=1, strict=True)
    baseline_steps: int = Field(default=30, ge=5, strict=True)
    allowed_growth: float = Field(default=3.0, gt=1, strict=True, allow_inf_nan=False)
    evidence_steps: int = Field(default=8, ge=1, strict=True)
    extreme_gap: float = Field(default=0.95, gt=0, le=1, strict=True, description="1 switches the check off.")
    affected_fraction: float = Field(default=0.01, gt=0, le=1, strict=True, description="1 switches the check off.")
    effective_fraction: float = Field(default=0.2, ge=0, lt=1, strict=True, description="0 switches the check off.")
    persist_steps: int = Field(default=5, ge=1, strict=True)
    skipped_steps: int = Field(default=10, ge=1, strict=True)
    loss_scale_minimum: float = Field(default=1.0, ge=0, strict=True, allow_inf_nan=False)
    sync_pearson: float = Field(default=0.5, ge=-1, lt=1, strict=True, description="-1 switches the check off.")
    sync_gap: float = Field(default=1.0, gt=0, strict=True, allow_inf_nan=False)


@settings("mismatch.{}".format)
class MismatchSettings:
    """Settings of the measurement at every step, and of the alarm.

    Attributes:
        enabled: False leaves verl's own trainer in place.
        ratio_threshold: C ≥ 1 for the metric "share of responses within C"; the paper uses 3.
        keep_tokens: Number of responses of each step whose tokens are kept beside the metrics file; 0 to 256.
        keep_text: Whether the text of these responses is kept, too.
        histograms: Whether to log histograms of the log-prob gap, where a logger supports them (docs/metrics.md).
        alarm: Settings of the alarm.
    """

    enabled: bool = Field(default=True, strict=True)
    ratio_threshold: float = Field(default=3.0, strict=True)
    keep_tokens: int = Field(default=0, ge=0, le=256, strict=True)
    keep_text: bool = Field(default=True, strict=True)
    histograms: bool = Field(default=True, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check the bound of C as the losses do, and that tokens are kept by a trainer that measures."""
        from verl_precision.losses.settings import require_threshold  # with torch, which who reads an alarm can spare

        require_threshold(self.ratio_threshold, "mismatch.ratio_threshold")
        if self.keep_tokens and not self.enabled:
            problem = "verl's own trainer keeps no tokens, and mismatch.enabled=False keeps that trainer"
            remedy = "Set mismatch.enabled=True."
            raise ConfigurationError(problem, setting="mismatch.keep_tokens", value=self.keep_tokens, remedy=remedy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MismatchSettings:
        """Return the settings in a config's block `mismatch`; missing ones have their defaults."""
        values = dict(config.get("mismatch") or {})
        return cls(**values | {"alarm": AlarmSettings(**(values.get("alarm") or {}))})
