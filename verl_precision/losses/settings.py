"""Bounds of the numbers a loss is configured with."""

import math

from verl_precision.errors import ConfigurationError

THRESHOLD = "actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_threshold"
WEIGHT_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
# Levels of `algorithm.rollout_correction.rollout_is` that are this package's: equations (9) and (10).
WEIGHTS = ("vp_token_tis", "vp_seq_mis")


def is_number(value: object) -> bool:
    """Return whether the value is a finite int or float (a bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_threshold(value: object, setting: str = "threshold") -> float:
    """Require C >= 1.

    Args:
        value: C.
        setting: its name in the message.

    Raises:
        ConfigurationError: if C is no number, not positive, or below 1. Below 1 it would truncate or reject responses
            that are exactly on-policy (ratio 1); this is also how `0.5_5` shows up, which YAML reads as the number
            0.55.
    """
    if not is_number(value) or not value >= 1:  # type: ignore[operator]
        raise ConfigurationError(
            "C bounds the importance weight from above",
            setting=setting,
            value=value,
            allowed="one number >= 1 (the paper's is 3; bands such as 0.5_5 are another estimator, and YAML reads that "
            "one as 0.55)",
            remedy="Set it to 3.0.",
        )
    return float(value)  # type: ignore[arg-type]


def require_clip_range(low: object, high: object) -> tuple[float, float]:
    """Require 0 < ε_low <= 1 and ε_high > 0.

    Raises:
        ConfigurationError: naming the setting.
    """
    if not is_number(low) or not 0 < low <= 1:  # type: ignore[operator]
        raise ConfigurationError(
            "the ratio is clipped below 1 - clip_ratio_low",
            setting="actor_rollout_ref.actor.clip_ratio_low",
            value=low,
            allowed="a number in (0, 1]",
            remedy="Set 0.2 (GSPO: 3e-4), or choose loss grpo_unclipped.",
        )
    if not is_number(high) or not high > 0:  # type: ignore[operator]
        raise ConfigurationError(
            "the ratio is clipped above 1 + clip_ratio_high",
            setting="actor_rollout_ref.actor.clip_ratio_high",
            value=high,
            allowed="a number > 0",
            remedy="Set 0.28 (GSPO: 4e-4), or choose loss grpo_unclipped.",
        )
    return float(low), float(high)  # type: ignore[arg-type]


def require_bypass(value: object, loss: str) -> None:
    """Require the marker that tells a worker that the old log-probs are the rollout's.

    Args:
        value: Value of the marker.
        loss: Name of the loss that needs the rollout's log-probs.

    Raises:
        ConfigurationError: unless it is True.
    """
    if value is not True:
        raise ConfigurationError(
            f"loss_mode={loss} weighs by the rollout's log-probs, and outside bypass mode verl hands it "
            "recomputed ones. This setting tells the worker whose log-probs it is given",
            setting="actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode",
            value=value,
            allowed="${algorithm.rollout_correction.bypass_mode}, where that is True",
            remedy=f"Choose the preset estimator={loss}, which sets both.",
        )


def require_plain_weights(normalised: object, level: str) -> None:
    """Require that verl does not normalise weights of this package.

    Args:
        normalised: Value of `rollout_is_batch_normalize`.
        level: One of `WEIGHTS`.

    Raises:
        ConfigurationError: if it does.
    """
    if normalised:
        raise ConfigurationError(
            f"with rollout_is={level}: normalised weights are not those of the equation",
            setting="algorithm.rollout_correction.rollout_is_batch_normalize",
            value=normalised,
            allowed="False",
            remedy="Set it to False.",
        )
