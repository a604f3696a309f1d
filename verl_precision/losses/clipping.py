"""What has a ratio in a loss, and where it clips: stated by each loss, read by the metrics, the alarm and `check`.

verl hands every loss one tensor of old log-probs. Outside bypass mode the trainer computed them, so that its rounding
cancels in the ratio; in bypass mode they are the rollout's, and the precision gap is in the ratio.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl_precision.losses.settings import clip_bounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """The ratio of a loss: π(θ) over the policy of the old log-probs.

    Attributes:
        level: What has a ratio of its own: each "token", each "sequence" (response), or nothing ("none").
        clip: How `actor.clip_ratio_low` and `actor.clip_ratio_high` bound the ratio, where a token beyond the bound has
            a gradient of exactly zero: "ratio" to [1 - low, 1 + high]; "dual" the same, and below `clip_ratio_c` where
            the advantage is negative; "log" to [e^-low, e^high]. None: no token loses its gradient to a clip range.
            The ratio of a sequence that is clipped is the geometric mean of its tokens'.
    """

    level: Literal["token", "sequence", "none"]
    clip: Literal["ratio", "dual", "log"] | None = None


NO_RATIO = Ratio("none")

VERLS_RATIOS: Mapping[str, Ratio] = {
    "vanilla": Ratio("token", "dual"),
    "bypass_mode": Ratio("token", "dual"),  # with loss_type=ppo_clip; reinforce has none
    "clip_cov": Ratio("token", "ratio"),
    "gspo": Ratio("sequence", "ratio"),
    "geo_mean": Ratio("token", "log"),
    # the clip range of the first two bounds a divergence of probabilities
    **dict.fromkeys(("dppo_tv", "dppo_kl", "sapo", "kl_cov", "cispo", "dro"), Ratio("token")),
    "gpg": NO_RATIO,
}
"""verl's name of a loss -> its ratio; those of this package stand at their functions (`registry.policy_loss`)."""


class ClipRange(NamedTuple):
    """Where a loss clips, in nats of log-ratio; plain numbers, because it travels to the workers."""

    sequence: bool  # the ratio is that of whole responses
    low: float  # clipped below if the advantage is negative
    high: float  # clipped above if it is positive
    dual: float = math.inf  # clipped above if it is negative

    def has_no_gradient(self, log_ratio: "Tensor", advantages: "Tensor") -> "Tensor":
        """Return where a token of this log-ratio, of a token or a response, and this advantage loses its gradient."""
        beyond = (log_ratio < self.low) | (log_ratio > self.dual)
        return ((log_ratio > self.high) & (advantages > 0)) | (beyond & (advantages < 0))


def clip_range(ratio: Ratio, actor: Mapping[str, Any]) -> ClipRange | None:
    """Return where a loss with this ratio clips, given the config's `actor_rollout_ref.actor`; None: it does not."""
    if ratio.clip is None:
        return None
    low, high = clip_bounds(actor)
    sequence = ratio.level == "sequence"
    if ratio.clip == "log":
        return ClipRange(sequence, -low, high)
    lowest = math.log1p(-low) if low < 1 else -math.inf  # no ratio is below 0
    dual = math.log(actor.get("clip_ratio_c") or 3.0) if ratio.clip == "dual" else math.inf
    return ClipRange(sequence, lowest, math.log1p(high), dual)
