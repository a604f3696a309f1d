"""What an estimator decides of each token of a response: kept, clipped, phantom-clipped, masked or truncated.

No bound is computed here. A loss of `POLICY_LOSSES` is asked for its own gradient, Σₜ sₜ ∇log π(yₜ), once with its
bounds and once with bounds so wide that none binds (`rollout_weights` likewise):

    masked            sₜ = 0 for another reason than the clip range: a weight of 0, a response or token taken out
    clipped           sₜ = 0, and not 0 without the clip range
    phantom-clipped   clipped, and not with the log-probs of the shadow: for its rounding alone (`phantom.py`)
    truncated         sₜ ≠ 0 is another number than without the bounds
    kept              all others, those without an advantage included

Of verl's own losses those are known that state their clip range (`losses.clipping`). All is as at the first mini-batch
of a step, which sees the weights that the step begins with.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import verl_precision.losses  # noqa: F401 - every loss is registered
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.clipping import ClipRange
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import LEVELS
from verl_precision.losses.settings import require_band
from verl_precision.tools.kept_tokens.kept_file import (
    CLIPPED,
    DECISIONS,
    KEPT,
    MASKED,
    NOT_OURS,
    PHANTOM,
    TRUNCATED,
    UNKNOWN,
    KeptResponse,
)

CODE = {name: code for code, name in enumerate(DECISIONS)}
LOST = [CODE[name] for name in (CLIPPED, PHANTOM, MASKED)]  # a token with an advantage gave no gradient
# Bounds that never bind: beyond 2e11, at which float32 ratios are held, and within float32.
_WIDE = 1e30
_WIDE_CLIP = {"clip_low": 1.0, "clip_high": _WIDE}
_WIDE_BOUNDS = {**_WIDE_CLIP, "threshold": _WIDE, "rejection_threshold": _WIDE}
_ROUNDING = 1e-4  # a weight that a bound changes by less counts as unchanged


@dataclass(frozen=True)
class Estimator:
    """An estimator's name and numbers, all that its decisions depend on; plain, because it is kept with the tokens.

    Attributes:
        name: In words.
        loss: verl's `loss_mode`.
        bounds: Those of clip_low, clip_high, threshold and rejection_threshold that its function needs.
        against_rollout: Whether the loss is given the rollout's log-probs as the old ones (bypass mode); else the
            trainer's own, so that its ratio is 1.
        level: `rollout_is`, or None.
        level_threshold: Its threshold.
        clip: `ClipRange` of a loss of verl's own.
        beta_in_ratio: Whether the loss sees the trainer's log-probs, and not a shadow's.
        known: Whether the loss says where its tokens lose their gradient.
    """

    name: str
    loss: str
    bounds: Mapping[str, float] = field(default_factory=dict)
    against_rollout: bool = True
    level: str | None = None
    level_threshold: Any = None
    clip: tuple[bool, float, float, float] | None = None
    beta_in_ratio: bool = True
    known: bool = True

    def settings(self) -> dict[str, Any]:
        """Return plain values; `Estimator(**values)` is the same again."""
        return asdict(self)


def _weighted(name: str, level: str, threshold: Any) -> Estimator:
    return Estimator(name, "vp_grpo", {"clip_low": 0.2, "clip_high": 0.28}, False, level, threshold)


OTHERS = (
    Estimator("grpo, bypass mode", "vp_grpo", {"clip_low": 0.2, "clip_high": 0.28}),
    _weighted("grpo_token_tis", "vp_token_tis", 2.0),
    _weighted("grpo_seq_mis", "vp_seq_mis", 3.0),
    _weighted("geo_mask", "vp_geo_mask", "0.999_1.001"),
    _weighted("icepop", "vp_icepop", "0.5_5.0"),
    _weighted("kpop", "vp_kpop", 0.1),
    Estimator("pg_seq_tis", "vp_pg_seq_tis", {"threshold": 3.0}),
    Estimator("pg_seq_mis", "vp_pg_seq_mis", {"threshold": 3.0}),
    Estimator("gspo, bypass mode", "vp_gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    Estimator("cispo, bypass mode", "vp_cispo", {"clip_low": 1.0, "clip_high": 5.0}),
    Estimator("dppo_tv", "vp_dppo_tv", {"threshold": 20.0, "clip_low": 0.15, "clip_high": 0.15}),
    Estimator("dppo_kl", "vp_dppo_kl", {"threshold": 20.0, "clip_low": 0.05, "clip_high": 0.05}),
    Estimator(
        "off_policy_sequence_mask", "vp_off_policy_sequence_mask",
        {"rejection_threshold": 0.5, "clip_low": 0.2, "clip_high": 0.28},
    ),
)  # fmt: skip
"""The presets whose decisions are shown beside the run's own, with their numbers."""


class Decided(NamedTuple):
    """What an estimator does with a response's tokens."""

    codes: np.ndarray  # [T] uint8, indices into `DECISIONS`
    slopes: np.ndarray  # [T] float32, sₜ; 0 at tokens that are not the policy's


@dataclass(frozen=True)
class Tokens:
    """A response, [T] floating each, and a mask, nonzero where the policy wrote the token."""

    log_probs: Tensor  # log π
    rollout_log_probs: Tensor  # log μ
    advantages: Tensor
    mask: Tensor
    shadow_log_probs: Tensor | None = None  # None: the rollout's stand for them, if the response is of present weights


def decisions_of(response: KeptResponse) -> dict[str, list[str]]:
    """Return what was decided of each token: by the run's own estimator as it was kept, then what `OTHERS` decide."""
    own = Estimator(**response.estimator_settings)
    given = {part.name: getattr(response, part.name) for part in fields(Tokens)}
    tokens = Tokens(**{name: torch.from_numpy(values) for name, values in given.items() if values is not None})
    found = {own.name: response.decisions}
    for other in OTHERS:
        if (other.loss, other.against_rollout, other.level) != (own.loss, own.against_rollout, own.level):
            found[other.name] = decide(other, tokens, not response.behind).codes
    return {name: [DECISIONS[code] for code in codes.tolist()] for name, codes in found.items()}


def decide(
    estimator: Estimator, tokens: Tokens, current: bool, weights: Tensor | None = None, left: Tensor | None = None
) -> Decided:
    """Return what an estimator decides of each token.

    Args:
        estimator: Which, and its numbers.
        tokens: The response.
        current: Whether the weights that sampled it are those that score it: then, without a shadow, the whole gap is
            rounding.
        weights: [T], the weights that verl's step made (`rollout_is_weights`); None: by the estimator's level.
        left: [T], the mask after verl's rejection; None: nothing was rejected.

    Returns:
        Codes and slopes. A response with a NaN or infinite number at one of the policy's tokens is left out by our
        losses: its tokens are masked.
    """
    ours = tokens.mask.bool()
    if left is not None:
        tokens = replace(tokens, mask=left)
    seen = tokens.log_probs
    if not estimator.beta_in_ratio and tokens.shadow_log_probs is not None:
        seen = tokens.shadow_log_probs
    free_weights = None
    if estimator.level is not None:
        free_weights = _weights(estimator.level, seen, tokens, None)
        if weights is None:
            weights = _weights(estimator.level, seen, tokens, estimator.level_threshold)
    slopes = _slopes(estimator, tokens, seen, weights, {})
    lost = (slopes == 0) & (tokens.advantages != 0) & ours
    codes = torch.full(ours.shape, CODE[KEPT if estimator.known else UNKNOWN], dtype=torch.uint8)
    has_clip = _has_clip(estimator)
    bounded = set(estimator.bounds) - (set(_WIDE_CLIP) if has_clip else set())
    if bounded or free_weights is not None:
        free = _slopes(estimator, tokens, seen, weights if free_weights is None else free_weights, _WIDE_BOUNDS)
        codes[~lost & ((slopes - free).abs() > _ROUNDING * free.abs())] = CODE[TRUNCATED]
    codes[lost] = CODE[MASKED]
    if has_clip and bool(lost.any()):
        clipped = lost & (_slopes(estimator, tokens, seen, weights, _WIDE_CLIP) != 0)
        codes[clipped] = CODE[CLIPPED]
        reference = tokens.shadow_log_probs
        if reference is None and current:
            reference = tokens.rollout_log_probs
        if reference is not None and estimator.beta_in_ratio and estimator.against_rollout:
            codes[clipped & (_slopes(estimator, tokens, reference, weights, {}) != 0)] = CODE[PHANTOM]
    codes[~ours] = CODE[NOT_OURS]
    return Decided(codes.numpy(), torch.where(ours, slopes, 0).float().numpy())


def _has_clip(estimator: Estimator) -> bool:
    entry = POLICY_LOSSES.get(estimator.loss)
    return estimator.clip is not None if entry is None else entry.ratio is None or entry.ratio.clip is not None


def _weights(level: str, log_probs: Tensor, tokens: Tokens, threshold: Any) -> Tensor | None:
    """Return the weights of a level, [T]; without a threshold those of a bound that never binds; None: not ours."""
    entry = LEVELS.get({"token": "vp_token_tis", "sequence": "vp_seq_mis"}.get(level, level))
    if entry is None:
        return None
    if threshold is None:
        threshold = f"{1 / _WIDE}_{_WIDE}" if entry.bounds is require_band else _WIDE
    policies = (log_probs, tokens.rollout_log_probs)
    given = policies if entry.of_log_probs else (policies[0] - policies[1],)
    return entry.weights(*(each.unsqueeze(0) for each in (*given, tokens.mask)), threshold)[0]


def _slopes(
    estimator: Estimator, tokens: Tokens, log_probs: Tensor, weights: Tensor | None, wide: Mapping[str, float]
) -> Tensor:
    """Return sₜ, [T], of a loss with some of its bounds made `wide`, at these log-probs of the trainer."""
    entry = POLICY_LOSSES.get(estimator.loss)
    old = tokens.rollout_log_probs if estimator.against_rollout else log_probs
    if entry is None:
        return _of_stated_clip(estimator, tokens, log_probs - old, weights, bool(wide))
    offered = {
        "rollout_log_probs": old,
        "proximal_log_probs": old,
        "advantages": tokens.advantages,
        "response_mask": tokens.mask,
        "rollout_is_weights": weights,
    }
    needed = entry.parameters
    given = {name: value.unsqueeze(0) for name, value in offered.items() if name in needed and value is not None}
    bounds = {name: wide.get(name, value) for name, value in estimator.bounds.items()}
    with torch.enable_grad():
        variable = log_probs.detach().unsqueeze(0).requires_grad_()
        output = entry.function(trainer_log_probs=variable, aggregation=Aggregation("token-sum"), **given, **bounds)
        (gradient,) = torch.autograd.grad(output.loss, variable)
    return -gradient[0]


def _of_stated_clip(
    estimator: Estimator, tokens: Tokens, log_ratio: Tensor, weights: Tensor | None, wide: bool
) -> Tensor:
    """Return the slopes of a loss of verl's own, r A wherever its clip range does not bind."""
    mask = tokens.mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0).double()
    clip = None if estimator.clip is None or wide else ClipRange(*estimator.clip)
    if estimator.clip is not None and estimator.clip[0]:
        log_ratio = (log_ratio.sum() / mask.sum().clamp(min=1)).expand_as(log_ratio)
    slopes = log_ratio.clamp(max=math.log(_WIDE)).exp() * tokens.advantages
    if clip is not None:
        slopes = torch.where(clip.silences(log_ratio, tokens.advantages), 0, slopes)
    return torch.where(mask, slopes if weights is None else slopes * weights, 0)
