"""Bounds of the settings that a loss reads, and what a worker must be told."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl_precision.base.errors import ConfigurationError

ACTOR = "actor_rollout_ref.actor"
THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_is_threshold"
REJECTION_THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_rs_threshold"
WEIGHT_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
NORM_MODE = "seq-mean-token-sum-norm"


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
require_threshold = Bounds(
    setting="threshold",
    holds=lambda threshold: threshold >= 1,
    problem="C bounds the importance weight from above",
    allowed="one number >= 1 (the paper's is 3; bands such as 0.5_5 are another estimator, and YAML reads that one as "
    "0.55)",
    remedy="Set it to 3.0.",
)
require_divergence = Bounds(
    setting="threshold",
    holds=lambda divergence: divergence > 0,
    problem="a token, or a response, is dropped where the two policies are further apart than this",
    allowed="one number > 0, in nats",
    remedy="Set it to 0.1 (estimator=kpop) or 0.5 (estimator=off_policy_sequence_mask).",
)
require_clip_low = Bounds(
    setting=f"{ACTOR}.clip_ratio_low",
    holds=lambda low: 0 < low <= 1,
    problem="the ratio is clipped below 1 - clip_ratio_low",
    allowed="a number in (0, 1]",
    remedy="Set 0.2 (GSPO: 3e-4), or choose loss vp_grpo_unclipped.",
)
require_clip_high = Bounds(
    setting=f"{ACTOR}.clip_ratio_high",
    holds=lambda high: high > 0,
    problem="the ratio is clipped above 1 + clip_ratio_high",
    allowed="a number > 0",
    remedy="Set 0.28 (GSPO: 4e-4), or choose loss vp_grpo_unclipped.",
)
require_normalizer = Bounds(
    setting=f"{ACTOR}.loss_scale_factor",
    holds=lambda normalizer: normalizer > 0,
    problem=f"with loss_agg_mode={NORM_MODE} the sum over tokens is divided by one constant for the whole run. Without "
    "it, verl divides by the padded width of each micro-batch, so that the gradient changes with how the batch is cut",
    allowed="a number > 0",
    remedy=f"Set {ACTOR}.loss_scale_factor=${{data.max_response_length}}.",
)


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
        raise ConfigurationError(
            "a token, or a response, is kept where its ratio is within this band",
            setting=setting,
            value=value,
            allowed="a text of two numbers with a decimal point each, one below and one above 1 (YAML reads 0.5_5 as "
            "0.55)",
            remedy="Set it to '0.5_5.0' for tokens (estimator=icepop), '0.999_1.001' for responses (geo_mask).",
        )
    return low, high


def require_bypass(value: object, loss: str) -> None:
    """Require the marker that tells a worker that the old log-probs are the rollout's, which this loss needs."""
    if value is not True:
        raise ConfigurationError(
            f"loss_mode={loss} weighs by the rollout's log-probs, and outside bypass mode verl hands it recomputed "
            "ones. This setting tells the worker whose log-probs it is given",
            setting=f"{ACTOR}.policy_loss.rollout_correction.bypass_mode",
            value=value,
            allowed="${algorithm.rollout_correction.bypass_mode}, where that is True",
            remedy=f"Choose the preset estimator={loss.removeprefix('vp_')}, which sets both.",
        )


def require_plain_weights(normalised: object, level: str) -> None:
    """Require that verl does not normalise weights of this package, of a level of `rollout_weights.LEVELS`."""
    if normalised:
        raise ConfigurationError(
            f"with rollout_is={level}: normalised weights are not those of the equation",
            setting="algorithm.rollout_correction.rollout_is_batch_normalize",
            value=normalised,
            allowed="False",
            remedy="Set it to False.",
        )
