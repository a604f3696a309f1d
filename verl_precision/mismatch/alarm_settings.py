"""Settings of the alarm, with bounds."""

from typing import Literal

from pydantic import Field

from verl_precision.base.settings import settings


@settings("mismatch.alarm.{}".format)
class AlarmSettings:
    """When the alarm is raised, and what happens then; docs/alarm.md has the measured rates of the defaults.

    Attributes:
        on_alarm: `log` (say it and go on) or `stop` (say it, and end the run if the alarm is severe).
        baseline_steps: First steps that say what is normal for this run; ≥ 5.
        allowed_growth: k3 may be this many times its baseline for ever; > 1. The mean |log-prob gap| goes with its
            square, because k3 ≈ gap²/2: 3 allows it a factor of 1.73.
        evidence_steps: Full steps of evidence before growth is an alarm. Higher: fewer false alarms, as many steps
            later.
        extreme_gap: |π - μ| of a single token beyond which it counts as extreme; in (0, 1]. 1 switches the check off.
        affected_fraction: Share of phantom-clipped tokens that is too much; in (0, 1]. 1 switches the check off.
        effective_fraction: Effective sample size of a loss's weights, as a share of the responses, below which too few
            of them carry the gradient; in [0, 1). 0 switches the check off.
        persist_steps: Consecutive steps before extremes, tokens clipped for their rounding, or too few responses are
            an alarm.
        skipped_steps: Consecutive steps with a skipped update before that is an alarm.
        loss_scale_minimum: The scale at or below which there is no room left; the engine's `loss_scale.minimum`. 0
            switches the check off (a static scale of 1 is always there).
        sync_pearson: Correlation of trainer and rollout probabilities below which they are not one policy; in [-1, 1).
        sync_gap: Mean |log-prob gap|, nats, above which they are not one policy.
    """

    on_alarm: Literal["log", "stop"] = Field(default="log", description="The value log never ends a run.")
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
