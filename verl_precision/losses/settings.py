"""Bounds of the settings that a loss reads, and what a worker must be told."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.base.files import table_of

ACTOR = "actor_rollout_ref.actor"
THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_is_threshold"
REJECTION_THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_rs_threshold"
WEIGHT_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
NORM_MODE = "seq-mean-token-sum-norm"
_WORDS = table_of(__file__, "settings.json")


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have. Call it with a value to check it."""

    setting: str  # its name in a config
    holds: Callable[[float], bool]  # whether a finite number is within the bounds
    problem: str  # of a number beyond them
    allowed: str  # the bounds in words
    remedy: str

    def __call__(self, value: object, setting: str | None = None) -> float:
        """Return a config's value as a float, or raise `ConfigurationError` that names `setting`, if that is another.

        The value must be a finite number (a bool is none) within the bounds.
        """
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not self.holds(value):  # type: ignore[arg-type]
            raise ConfigurationError(
                self.problem, setting=setting or self.setting, value=value, allowed=self.allowed, remedy=self.remedy
            )
        return float(value)  # type: ignore[arg-type]


# Below 1, C would truncate or reject responses that are exactly on-policy (ratio 1).
require_threshold = Bounds(**_WORDS["threshold"], holds=lambda threshold: threshold >= 1)
require_divergence = Bounds(**_WORDS["divergence"], holds=lambda divergence: divergence > 0)
require_clip_low = Bounds(**_WORDS["clip_low"], holds=lambda low: 0 < low <= 1)
require_clip_high = Bounds(**_WORDS["clip_high"], holds=lambda high: high > 0)
require_normalizer = Bounds(**_WORDS["normalizer"], holds=lambda normalizer: normalizer > 0)


def require_clip_range(low: object, high: object) -> tuple[float, float]:
    """Require 0 < ε_low <= 1 and ε_high > 0; the error names the one that is out of bounds."""
    return require_clip_low(low), require_clip_high(high)


def require_band(value: object, setting: str) -> tuple[float, float]:
    """Return lower and upper bound of a band, 0 < lower < 1 < upper, written as verl writes it: "0.999_1.001"."""
    try:
        low, high = map(float, str(value).split("_")) if isinstance(value, str) else (0.0, 0.0)
    except ValueError:
        low = high = 0.0
    if not 0 < low < 1 < high < math.inf:
        raise ConfigurationError(setting=setting, value=value, **_WORDS["band"])
    return low, high


def require_bypass(value: object, loss: str) -> None:
    """Require the marker that tells a worker that the old log-probs are the rollout's, which this loss needs."""
    if value is not True:
        words = filled(_WORDS["bypass"], loss=loss, preset=loss.removeprefix("vp_"))
        raise ConfigurationError(value=value, **words)


def require_plain_weights(normalised: object, level: str) -> None:
    """Require that verl does not normalise weights of this package, of a level of `rollout_weights.LEVELS`."""
    if normalised:
        raise ConfigurationError(value=normalised, **filled(_WORDS["plain"], level=level))
