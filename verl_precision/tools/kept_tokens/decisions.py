"""The estimator's decision on each token of a response: kept, clipped, phantom-clipped, masked or truncated.

A loss of `POLICY_LOSSES` reports its decisions (`LossOutput`). Its gradient is Σₜ sₜ ∇log π(yₜ), with slopes sₜ:

    masked            sₜ = 0 for another reason than the clip range: a weight of 0, a response or token taken out
    clipped           sₜ = 0 only because of the clip range
    phantom-clipped   clipped, but not with the log-probs of the shadow: only the rounding clips it (`phantom.py`)
    truncated         sₜ ≠ 0 differs from its value without the bounds
    kept              all other tokens, also tokens without an advantage

Of verl's own losses, only those that state their clip range (`losses.settings`) have known decisions. All decisions
are those of a step's first mini-batch, which uses the weights from the start of the step.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import verl_precision.losses  # noqa: F401 - every loss is registered
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.registry import POLICY_LOSSES, LossInputs, LossInUse
from verl_precision.losses.rollout_weights import WEIGHT_KINDS
from verl_precision.losses.settings import ClipRange, require_threshold
from verl_precision.tools.kept_tokens import kept_file
from verl_precision.tools.kept_tokens.kept_file import CLIPPED, DECISIONS, MASKED, PHANTOM, TRUNCATED

CODE = {name: code for code, name in enumerate(DECISIONS)}
LOST = [CODE[name] for name in (CLIPPED, PHANTOM, MASKED)]  # with an advantage, such a token gave no gradient
_ROUNDING = 1e-4  # relative; a smaller change of a weight counts as none
_LARGEST_LOG_RATIO = math.log(1e30)  # bound for verl's own losses
_OURS = {"token": "vp_token_tis", "sequence": "vp_seq_mis"}  # verl's level -> our kind of weights


class Decided(NamedTuple):
    """The decisions of an estimator on the tokens of a response."""

    codes: np.ndarray  # [T] uint8, indices into `DECISIONS`
    slopes: np.ndarray  # [T] float32, sₜ; 0 at tokens that are not the policy's


@dataclass(frozen=True)
class Tokens:
    """A response: floating tensors of shape [T], and a mask that is nonzero where the policy wrote the token."""

    log_probs: Tensor  # log π
    rollout_log_probs: Tensor  # log μ
    advantages: Tensor
    mask: Tensor
    shadow_log_probs: Tensor | None = None  # None: the rollout's log-probs are used if the current weights sampled


def decide(
    used: LossInUse, tokens: Tokens, current: bool, weights: Tensor | None = None, left: Tensor | None = None
) -> Decided:
    """Return an estimator's decision on each token, and the slope of each token.

    `current`: the same weights sampled and score the response, so that without a shadow the whole gap is rounding.
    `weights` [T] are the weights from verl's step (`rollout_is_weights`), if the estimator has a level. `left` [T] is
    the mask after verl's rejection. Our losses leave out a response that has a NaN or an infinite number at a token of
    the policy: its tokens are masked.
    """
    ours = tokens.mask.bool()
    tokens = tokens if left is None else replace(tokens, mask=left)
    shadow = tokens.shadow_log_probs
    seen = tokens.log_probs if used.beta_in_ratio or shadow is None else shadow
    slopes, clipped, truncated = _outcome(used, tokens, seen, weights)
    lost = (slopes == 0) & (tokens.advantages != 0) & ours
    codes = torch.full(ours.shape, CODE[kept_file.KEPT if used.known else kept_file.UNKNOWN], dtype=torch.uint8)
    for beyond in (_held(used, seen, tokens, weights), truncated):
        if beyond is not None:
            codes[beyond & (slopes != 0)] = CODE[TRUNCATED]
    codes[lost] = CODE[MASKED]
    if clipped is not None and bool((clipped := clipped & lost).any()):
        codes[clipped] = CODE[CLIPPED]
        reference = tokens.rollout_log_probs if shadow is None and current else shadow
        if reference is not None and used.beta_in_ratio and used.against_rollout:
            without_rounding, _, _ = _outcome(used, tokens, reference, weights)
            codes[clipped & (without_rounding != 0)] = CODE[PHANTOM]
    codes[~ours] = CODE[kept_file.NOT_OURS]
    return Decided(codes.numpy(), torch.where(ours, slopes, 0).float().numpy())


def _held(used: LossInUse, log_probs: Tensor, tokens: Tokens, weights: Tensor | None) -> Tensor | None:
    """Return which tokens' weights were truncated at a level's threshold; None for a level that drops tokens."""
    kind = WEIGHT_KINDS.get(_OURS.get(used.level or "", used.level or ""))
    if weights is None or kind is None or kind.bounds is not require_threshold:  # other kinds only keep or drop
        return None
    gap = torch.where(tokens.mask.bool(), log_probs - tokens.rollout_log_probs, 0)
    free = (gap.sum() if kind.of_responses else gap).exp()
    return (weights / free - 1).abs() > _ROUNDING


def _outcome(
    used: LossInUse, tokens: Tokens, log_probs: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return sₜ, and which tokens a loss clips and truncates, [T] each, for these log-probs of the trainer."""
    old, entry = tokens.rollout_log_probs if used.against_rollout else log_probs, POLICY_LOSSES.get(used.loss)
    if entry is None:
        return _of_stated_clip(used, tokens, log_probs - old, weights)
    inputs = LossInputs(log_probs.detach(), old, tokens.advantages, tokens.mask, weights)
    inputs = inputs.of_all(lambda tensor: tensor.unsqueeze(0))
    with torch.enable_grad():
        inputs.trainer_log_probs.requires_grad_()
        output = entry(inputs.by_name(), Aggregation("token-sum"), **used.bounds)
        (gradient,) = torch.autograd.grad(output.loss, inputs.trainer_log_probs)
    clipped, truncated = (None if each is None else each[0] for each in (output.clipped, output.truncated))
    return -gradient[0], clipped, truncated


def _of_stated_clip(
    used: LossInUse, tokens: Tokens, log_ratio: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    """Return the same for one of verl's own losses: sₜ = r A where its clip range has no effect."""
    mask = tokens.mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0).double()
    if used.clip is not None and used.clip[0]:
        log_ratio = (log_ratio.sum() / mask.sum().clamp(min=1)).expand_as(log_ratio)
    slopes = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp() * tokens.advantages
    slopes = torch.where(mask, slopes if weights is None else slopes * weights, 0)
    if used.clip is None:
        return slopes, None, None
    clipped = ClipRange(*used.clip).has_no_gradient(log_ratio, tokens.advantages) & (slopes != 0)
    return torch.where(clipped, 0, slopes), clipped, None
