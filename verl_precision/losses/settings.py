"""The settings of a loss with their bounds, and its clip range, declared once for each loss.

verl passes one tensor of old log-probs to every loss. Outside bypass mode the trainer computed them, so its rounding
cancels in the ratio. In bypass mode they are the rollout's, so the ratio contains the precision gap.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import Self

from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.base.files import table_of

if TYPE_CHECKING:
    from torch import Tensor

ACTOR = "actor_rollout_ref.actor"
THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_is_threshold"
REJECTION_THRESHOLD = f"{ACTOR}.policy_loss.rollout_correction.rollout_rs_threshold"
WEIGHT_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
NORM_MODE = "seq-mean-token-sum-norm"
WORDS = table_of(__file__, "settings.json")


@dataclass(frozen=True)
class Bounds:
    """The allowed range of a setting. Call it with a value to check that value."""

    holds: Callable[[float], bool]  # whether a finite number is within the bounds
    words: Mapping[str, str]  # of the error: setting, problem, allowed, remedy

    def __call__(self, value: object, setting: str | None = None) -> float:
        """Return a finite number within the bounds as a float, or raise an error that names `setting` if given."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            if self.holds(value):
                return float(value)
        raise ConfigurationError(value=value, **{**self.words, **({"setting": setting} if setting else {})})


# Below 1, C would truncate or reject responses that are exactly on-policy (ratio 1).
require_threshold = Bounds(lambda threshold: threshold >= 1, WORDS["threshold"])
require_divergence = Bounds(lambda divergence: divergence > 0, WORDS["divergence"])
require_clip_low = Bounds(lambda low: 0 < low <= 1, WORDS["clip_low"])
require_clip_high = Bounds(lambda high: high > 0, WORDS["clip_high"])
require_gap_penalty = Bounds(lambda beta: beta > 0, WORDS["gap_penalty"])
require_normalizer = Bounds(lambda normalizer: normalizer > 0, WORDS["normalizer"])


@dataclass(frozen=True)
class LossSettings:
    """The numeric arguments of a loss; None: the loss has no such parameter, or keeps its own default."""

    threshold: float | None = None  # C
    rejection_threshold: float | None = None  # δ
    clip_low: float | None = None  # ε_low, whose bounds the loss itself checks
    clip_high: float | None = None  # ε_high
    gap_penalty: float | None = None  # β, an option of every loss

    @classmethod
    def from_config(cls, actor: Mapping[str, Any], parameters: Collection[str]) -> Self:
        """Return the settings of a loss with these parameters, from `actor_rollout_ref.actor` or verl's ActorConfig.

        Raises:
            ConfigurationError: If a threshold is out of its bounds, or missing.
        """
        correction = actor["policy_loss"].get("rollout_correction") or {}
        found: dict[str, float] = {}
        if "threshold" in parameters:
            found["threshold"] = require_threshold(correction.get("rollout_is_threshold"), THRESHOLD)
        if "rejection_threshold" in parameters:
            value = correction.get("rollout_rs_threshold")
            found["rejection_threshold"] = require_divergence(value, REJECTION_THRESHOLD)
        for side, name in enumerate(("clip_low", "clip_high")):
            if name in parameters:
                found[name] = clip_bounds(actor)[side]
        if (beta := actor["policy_loss"].get("dro_beta")) is not None:
            found["gap_penalty"] = require_gap_penalty(beta)
        return cls(**found)

    def arguments(self) -> dict[str, float]:
        """Return the arguments of the loss, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def clip_bounds(actor: Mapping[str, Any]) -> tuple[float, float]:
    """Return ε_low and ε_high of a config's `actor_rollout_ref.actor`; `clip_ratio` for a side that is not set."""
    low, high = actor.get("clip_ratio_low"), actor.get("clip_ratio_high")
    both = actor["clip_ratio"]
    return float(both if low is None else low), float(both if high is None else high)


def require_clip_range(low: object, high: object) -> tuple[float, float]:
    """Return 0 < ε_low <= 1 and ε_high > 0; the error names the setting that is out of bounds."""
    return require_clip_low(low), require_clip_high(high)


def require_band(value: object, setting: str) -> tuple[float, float]:
    """Return lower and upper bound of a band, 0 < lower < 1 < upper, written as verl writes it: "0.999_1.001"."""
    try:
        low, high = map(float, str(value).split("_")) if isinstance(value, str) else (0.0, 0.0)
    except ValueError:
        low = high = 0.0
    if not 0 < low < 1 < high < math.inf:
        raise ConfigurationError(setting=setting, value=value, **WORDS["band"])
    return low, high


def require_bypass(value: object, loss: str) -> None:
    """Require the marker that tells a worker that the old log-probs are the rollout's, which this loss needs."""
    if value is not True:
        words = filled(WORDS["bypass"], loss=loss, preset=loss.removeprefix("vp_"))
        raise ConfigurationError(value=value, **words)


def require_plain_weights(normalised: object, level: str) -> None:
    """Require that verl does not normalise the weights of a level of `rollout_weights.WEIGHT_KINDS`."""
    if normalised:
        raise ConfigurationError(value=normalised, **filled(WORDS["plain"], level=level))


@dataclass(frozen=True)
class Ratio:
    """The ratio of a loss: π(θ) over the policy of the old log-probs.

    Attributes:
        level: The unit that has a ratio: each "token", each "sequence" (response), or nothing ("none").
        clip: How `actor.clip_ratio_low` and `actor.clip_ratio_high` bound the ratio, where a token beyond the bound has
            a gradient of exactly zero: "ratio" to [1 - low, 1 + high]; "dual" the same, and below `clip_ratio_c` where
            the advantage is negative; "log" to [e^-low, e^high]. None: no token loses its gradient to a clip range.
            The clipped ratio of a sequence is the geometric mean of its tokens' ratios.
    """

    level: Literal["token", "sequence", "none"]
    clip: Literal["ratio", "dual", "log"] | None = None


NO_RATIO = Ratio("none")

VERLS_RATIOS: Mapping[str, Ratio] = {
    "vanilla": Ratio("token", "dual"),
    "bypass_mode": Ratio("token", "dual"),  # with loss_type=ppo_clip; reinforce has no ratio
    "clip_cov": Ratio("token", "ratio"),
    "gspo": Ratio("sequence", "ratio"),
    "geo_mean": Ratio("token", "log"),
    # in the first two, the clip range bounds a divergence of probabilities
    **dict.fromkeys(("dppo_tv", "dppo_kl", "sapo", "kl_cov", "cispo", "dro"), Ratio("token")),
    "gpg": NO_RATIO,
}
"""verl's name of a loss -> its ratio; this package's losses declare theirs in `registry.policy_loss`."""


class ClipRange(NamedTuple):
    """Where a loss clips, in nats of log-ratio; plain numbers, because the range is sent to the workers."""

    sequence: bool  # the ratio is that of whole responses
    low: float  # clipped below if the advantage is negative
    high: float  # clipped above if it is positive
    dual: float = math.inf  # clipped above if it is negative

    @classmethod
    def around_one(cls, low: float, high: float, dual: float = math.inf, sequence: bool = False) -> "ClipRange":
        """Return the range of ratios from 1 - `low` to 1 + `high`; no ratio is below 0. `dual` is a ratio."""
        lowest = math.log1p(-low) if low < 1 else -math.inf
        return cls(sequence, lowest, math.log1p(high), math.log(dual))

    def has_no_gradient(self, log_ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        """Return where a token with this advantage and log-ratio (its own or its response's) loses its gradient."""
        beyond = (log_ratio < self.low) | (log_ratio > self.dual)
        return ((log_ratio > self.high) & (advantages > 0)) | (beyond & (advantages < 0))


def clip_range(ratio: Ratio, actor: Mapping[str, Any]) -> ClipRange | None:
    """Return where a loss with this ratio clips, given `actor_rollout_ref.actor`; None if the loss does not clip."""
    if ratio.clip is None:
        return None
    low, high = clip_bounds(actor)
    sequence = ratio.level == "sequence"
    if ratio.clip == "log":
        return ClipRange(sequence, -low, high)
    dual = (actor.get("clip_ratio_c") or 3.0) if ratio.clip == "dual" else math.inf
    return ClipRange.around_one(low, high, dual, sequence)
