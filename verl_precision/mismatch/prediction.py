"""Predicts from k3 and the length of a response what is left of the responses under an estimator's weights.

Assumed: the gaps of a response's tokens are independent and normal, with variance 2 k3. Then the log-weight of T tokens
is normal with the spread s = √(2 k3 T) and the mean -s²/2. docs/log/prediction.md has measured runs beside it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_precision.base.files import table_of
from verl_precision.losses.settings import require_band
from verl_precision.mismatch.alarm import FEWEST
from verl_precision.presets import PRESETS_DIR, preset_names

LENGTHS = (512, 2_048, 8_192, 32_768)  # tokens
_LARGEST = 20.0  # nats; with such a spread any share is 0, and larger exponents overflow
# The weight of a response ρ, by `loss_mode`, `rollout_is` or `rollout_rs`: ρ (full), min(ρ, C) (cut), ρ 1{ρ ≤ C}
# (masked), 1{ρ^(1/T) in a band} (mean), or 1{k3 of each token ≤ δ} (worst).
_KINDS = {"vp_pg_seq_is": "full", "vp_pg_seq_tis": "cut", "vp_pg_seq_mis": "masked", "sequence": "cut"}
_KINDS |= {"vp_seq_mis": "masked", "vp_geo_mask": "mean", "seq_max_k3": "worst"}


class Weighting(NamedTuple):
    """The weights of an estimator that contain the gap between the engines."""

    name: str  # the estimator, for readers
    kind: str  # one of `_KINDS`; token: tokens have weights, or nothing has
    bound: Any  # C, the band, or δ

    def share(self, k3: float, tokens: float) -> float:
        """Return the effective share, 0 to 1: of the responses, or of the tokens if these have weights."""
        s = min(predicted_spread(k3, 1 if self.kind == "token" else tokens), _LARGEST)
        if self.kind in ("full", "token") or s == 0:
            return math.exp(-s * s)
        if self.kind == "mean":
            low, high = (_normal((math.log(side) + k3) * tokens / s) for side in require_band(self.bound, "band"))
            return high - low
        c = float(str(self.bound).rpartition("_")[2])  # of a band its upper end
        if self.kind == "worst":  # k3 of a token ≈ half its squared gap
            return (1 - math.erfc(math.sqrt(c / (2 * k3)))) ** tokens
        above = _normal(-(math.log(c) + s * s / 2) / s) if self.kind == "cut" else 0.0  # P(ρ > C)
        mean = _normal((math.log(c) - s * s / 2) / s) + c * above
        return mean**2 / (math.exp(s * s) * _normal((math.log(c) - 1.5 * s * s) / s) + c * c * above)


def predicted_spread(k3: float, tokens: float) -> float:
    """Return the predicted spread of the log-weights of responses of this length, √(2 k3 T), in nats."""
    return math.sqrt(2 * k3 * tokens)


def weighting_of(config: Mapping[str, Any] | str) -> Weighting:
    """Return how the estimator of a composed config, or an estimator preset, weighs."""
    name, node = (config, table_of(f"{PRESETS_DIR}/estimator/{config}.py")) if isinstance(config, str) else ("", config)
    policy = ((node.get("actor_rollout_ref") or {}).get("actor") or {}).get("policy_loss") or {}
    verls, own = (each.get("rollout_correction") or {} for each in (node.get("algorithm") or {}, policy))
    loss = policy.get("loss_mode", "vanilla")
    found = {loss: own.get("rollout_is_threshold")}
    if loss == "bypass_mode" or not verls.get("bypass_mode"):  # else verl ignores them
        found |= {verls.get(key): verls.get(f"{key}_threshold") for key in ("rollout_is", "rollout_rs")}
    word = next((word for word in found if word in _KINDS), loss)
    return Weighting(name or str(word).removeprefix("vp_"), _KINDS.get(word, "token"), found[word])


def surviving_estimators(k3: float, tokens: float) -> tuple[str, ...]:
    """Return the estimator presets whose effective share at this k3 and length is at least the alarm's least."""
    return tuple(name for name in preset_names("estimator") if weighting_of(name).share(k3, tokens) >= FEWEST)


def prediction_in_words(k3: float, tokens: float, estimator: str | Weighting | None = None) -> str:
    """Return whether a k3 matters at a length, for an estimator (a preset, or its weighting) or for `pg_seq_is`."""
    one = estimator if isinstance(estimator, Weighting) else weighting_of(estimator or "pg_seq_is")
    share, spread = one.share(k3, tokens), predicted_spread(k3, tokens)
    said = f"At {tokens:,.0f} tokens a k3 of {k3:.2g} predicts log-weights with a spread of {spread:.2g} nats"
    if one.kind == "token":
        return f"{said}. {one.name} does not weigh whole responses, so the length does not matter to it."
    end = "enough" if share >= FEWEST else f"below {FEWEST:.0%}. Use precision=fp16, or estimator=grpo_token_tis"
    return f"{said}, and for {one.name} an effective share of {100 * share:.3g}% of the responses: {end}."


def _normal(x: float) -> float:
    """Return the probability that a standard normal number is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2
