"""Weights that turn `grpo` into the paper's equations (9) and (10), or that mask tokens or whole responses.

The weights come from the ratio of the trainer's policy to the rollout's, both at the θ' that drew the response, so
they are constants, computed once for a batch before an update. Source: https://arxiv.org/abs/2510.26788, section 2.1.1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.losses.dppo import binary_kl
from verl_precision.losses.ratios import bounded_exp
from verl_precision.losses.settings import require_band, require_divergence, require_threshold


def token_tis_weights(log_ratio: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Return min(ρₜ, C), equation (9).

    Args:
        log_ratio: [B, T] floating, log ρₜ = log π(yₜ; θ') - log μ(yₜ; θ') in nats.
        response_mask: [B, T], nonzero where a token counts.
        threshold: C >= 1.

    Returns:
        [B, T] in the dtype of `log_ratio`, without graph; 0 where masked, whatever is there. If a valid token has
        NaN or inf, the weights of the whole response are NaN, and `grpo` leaves it out and counts it. No finite
        log-ratio is altered: exp overflows to inf only far above C.

    Raises:
        ConfigurationError: If shapes differ, the log-ratio is not floating point, or C is out of bounds.
    """
    log_ratio_BT = _checked(log_ratio, response_mask)
    return _finished(log_ratio_BT.exp().clamp(max=require_threshold(threshold)), log_ratio_BT, response_mask)


def seq_mis_weights(log_ratio: Tensor, response_mask: Tensor, threshold: float) -> Tensor:
    """Return ρ 1{ρ ≤ C} with ρ = Πₜ ρₜ, equation (10), at every token of the response.

    One-sided: a small ρ is never rejected. A rejected response has weight 0 and keeps its mask, so that it stays in the
    denominator. log ρ is summed in float64. Arguments, result, errors, masked tokens and non-finite input as in
    `token_tis_weights`.
    """
    log_ratio_BT = _checked(log_ratio, response_mask)
    rho_B1 = log_ratio_BT.sum(dim=-1, keepdim=True, dtype=torch.float64).exp()
    return _finished(torch.where(rho_B1 <= require_threshold(threshold), rho_B1, 0), log_ratio_BT, response_mask)


def geo_mask_weights(log_ratio: Tensor, response_mask: Tensor, threshold: object) -> Tensor:
    """Return 1{lower ≤ ρ^(1/|y|) ≤ upper} with ρ = Πₜ ρₜ, at every token of the response.

    The geometric mean does not grow with the length of a response, but ρ does. The weight is 1 or 0: kept
    responses are not reweighted. verl's own `seq_mean_k1` keeps ratios in [1/upper, 1/lower].
    Source: https://richardli.xyz/rl-collapse-3, geometric rejection.

    The threshold is the band, "lower_upper", lower < 1 < upper. Everything else as in `seq_mis_weights`: a rejected
    response stays in the denominator.
    """
    low, high = require_band(threshold, "threshold")
    log_ratio_BT = _checked(log_ratio, response_mask)
    lengths_B1 = response_mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
    mean_B1 = log_ratio_BT.sum(dim=-1, keepdim=True, dtype=torch.float64) / lengths_B1
    return _finished((mean_B1 >= math.log(low)) & (mean_B1 <= math.log(high)), log_ratio_BT, response_mask)


def icepop_weights(log_ratio: Tensor, response_mask: Tensor, threshold: object) -> Tensor:
    """Return ρₜ 1{α ≤ ρₜ ≤ β}, IcePop's weight of each token.

    A token outside the band has weight 0 and stays in the denominator. If no token is inside, all weights are 0, and
    verl's own step divides by zero for a metric. The threshold is the band α_β as in `geo_mask_weights`. The rest is
    as in `token_tis_weights`. Source: https://arxiv.org/abs/2510.18855, section on IcePop.
    """
    low, high = require_band(threshold, "threshold")
    log_ratio_BT = _checked(log_ratio, response_mask)
    ratio_BT = log_ratio_BT.exp()
    return _finished(torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0), log_ratio_BT, response_mask)


def kpop_weights(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, threshold: object
) -> Tensor:
    """Return ρₜ 1{max(D(μ‖π), D(π‖μ)) ≤ φ}, KPop's weight of each token.

        D(p‖q) = p log(p/q) + (1 - p) log((1 - p)/(1 - q)),   the KL divergence of "this token or another one"

    π trainer's policy and μ rollout's, both at θ'. The band of ratios adapts: wide for a rare token, narrow for a
    likely token. Source: https://ringtech.notion.site/kpop, and its authors' step in AReaL (metric `binary_kl`).

    Log-probs are [B, T] floating, in nats; the threshold is φ > 0, in nats. ρₜ is held at 2e11 in float32, which the
    ratio of a token with hardly any probability can reach. Everything else as in `icepop_weights`.
    """
    limit, log_ratio_BT = require_divergence(threshold), _checked(trainer_log_probs - rollout_log_probs, response_mask)
    trainer_BT, rollout_BT = trainer_log_probs.detach(), rollout_log_probs.detach()
    divergence_BT = torch.maximum(binary_kl(trainer_BT, rollout_BT), binary_kl(rollout_BT, trainer_BT))
    ratio_BT = bounded_exp(log_ratio_BT, log_ratio_BT.dtype)
    return _finished(torch.where(divergence_BT <= limit, ratio_BT, 0), log_ratio_BT, response_mask)


class WeightKind(NamedTuple):
    """A kind of weight, chosen by verl's `algorithm.rollout_correction.rollout_is`."""

    weights: Callable[..., Tensor]
    bounds: Callable[[object, str], Any]  # checks its threshold; called with a value and the name of the setting
    of_responses: bool = False  # whether each response has one weight
    of_log_probs: bool = False  # whether it needs both policies' log-probs, not only their difference


WEIGHT_KINDS: Mapping[str, WeightKind] = {
    "vp_token_tis": WeightKind(token_tis_weights, require_threshold),
    "vp_seq_mis": WeightKind(seq_mis_weights, require_threshold, of_responses=True),
    "vp_geo_mask": WeightKind(geo_mask_weights, require_band, of_responses=True),
    "vp_icepop": WeightKind(icepop_weights, require_band),
    "vp_kpop": WeightKind(kpop_weights, require_divergence, of_log_probs=True),
}


def _checked(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Return the log-ratio without graph, 0 where masked."""
    if log_ratio.shape != response_mask.shape or log_ratio.dim() != 2 or not log_ratio.is_floating_point():
        shapes = f"has shape {tuple(log_ratio.shape)}, response_mask {tuple(response_mask.shape)}"
        allowed = "a floating-point tensor, in nats, and one shape [responses, tokens] for both"
        raise ConfigurationError(f"log_ratio is {log_ratio.dtype} and {shapes}", allowed=allowed)
    return torch.where(response_mask.bool(), log_ratio.detach(), 0)


def _finished(weights: Tensor, log_ratio_BT: Tensor, response_mask: Tensor) -> Tensor:
    """Return the weights at the tokens that count; NaN for a response with a log-ratio that is not finite."""
    broken_B1 = ~log_ratio_BT.isfinite().all(dim=-1, keepdim=True)
    return torch.where(response_mask.bool(), weights.to(log_ratio_BT.dtype).masked_fill(broken_B1, torch.nan), 0)
