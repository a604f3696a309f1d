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
        action_patience: Further steps in a row with an alarm that a rescue cures, and none of a fault, before it
            begins; ≥ 1.
        baseline_steps: First steps that say what is normal for this run; ≥ 5.
        allowed_growth: k3 may be this many times its baseline for ever; > 1. The mean |log-prob gap| goes with its
            square, because k3 ≈ gap²/2: 3 allows it a factor of 1.73.
        evidence_steps: Full steps of evidence before growth is an alarm. Higher: fewer false alarms, as many steps
            later. Of all such steps, twice as many count too where every fourth one or more has the symptom.
        extreme_gap: |π - μ| of a single token beyond which it counts as extreme; in (0, 1]. 1 switches the check off.
        affected_fraction: Share of phantom-clipped tokens that is too much; in (0, 1]. 1 switches the check off.
        effective_fraction: Effective sample size of a loss's weights, or of what verl's rejection keeps, as a share of
            the responses (of the tokens, where tokens have weights), below which too few of them carry the gradient;
            in [0, 1). 0 switches the check off.
        persist_steps: Consecutive steps before extremes, tokens clipped for their rounding, or too few responses are
            an alarm.
        skipped_steps: Consecutive steps with a skipped update before that is an alarm.
        loss_scale_minimum: The scale at or below which there is no room left; the engine's `loss_scale.minimum`. 0
            switches the check off (a static scale of 1 is always there).
        sync_pearson: Correlation of trainer and rollout probabilities below which they are not one policy; in [-1, 1).
        sync_gap: Mean |log-prob gap|, nats, above which they are not one policy.
    """

    on_alarm: Literal["log", "stop", "rescue"] = Field(
        default="log", description="The value log never ends or changes a run."
    )
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
    """What is measured at every step, and what is done about it.

    Attributes:
        enabled: False leaves verl's own trainer in place.
        ratio_threshold: C ≥ 1 of the shares of responses within C; the paper's is 3.
        keep_tokens: N, the responses of each step whose tokens are kept beside the metrics file; 0: none. At most 256.
        keep_text: Whether their text is kept, too.
        alarm: When to speak up.
    """

    enabled: bool = Field(default=True, strict=True)
    ratio_threshold: float = Field(default=3.0, strict=True)
    keep_tokens: int = Field(default=0, ge=0, le=256, strict=True)
    keep_text: bool = Field(default=True, strict=True)
    alarm: AlarmSettings = AlarmSettings()

    def __post_init__(self) -> None:
        """Check the bound of C as the losses do, and that tokens are kept by a trainer that measures."""
        from verl_precision.losses.settings import require_threshold  # with torch, which who reads an alarm can spare

        require_threshold(self.ratio_threshold, "mismatch.ratio_threshold")
        if self.keep_tokens and not self.enabled:
            problem = "verl's own trainer keeps none: mismatch.enabled=False leaves it in place"
            remedy = "Set mismatch.enabled=True."
            raise ConfigurationError(problem, setting="mismatch.keep_tokens", value=self.keep_tokens, remedy=remedy)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MismatchSettings:
        """Return the settings in a config's block `mismatch`; what it leaves out has its default."""
        values = dict(config.get("mismatch") or {})
        return cls(**values | {"alarm": AlarmSettings(**(values.get("alarm") or {}))})
