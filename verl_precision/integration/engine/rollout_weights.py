"""Equations (9) and (10), and three masks, in verl's rollout-correction step:
`algorithm.rollout_correction.rollout_is=vp_token_tis|vp_seq_mis|vp_geo_mask|vp_icepop|vp_kpop`.

They are levels of our own beside verl's (docs/math.md says why), in the same step and under the same settings, and they
arrive at the loss as `rollout_is_weights`, as verl's do.
"""

import math
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from verl_precision.integration.ledger import set_within, wrap_once
from verl_precision.losses.metrics import weight_statistics
from verl_precision.losses.rollout_weights import WEIGHT_KINDS
from verl_precision.losses.settings import WEIGHT_THRESHOLD, require_plain_weights, require_threshold

# The log-probs of trainer and rollout whose weights are being made: verl hands their difference on.
_log_probs: ContextVar[tuple[Tensor, Tensor]] = ContextVar("log_probs")


def register_weights(rollout_corr_helper: ModuleType) -> None:
    """Offer `WEIGHT_KINDS` in verl's rollout-correction step, once; verl's own levels pass through unchanged."""
    wrap_once(rollout_corr_helper.__name__, "compute_rollout_correction_and_rejection_mask", _with_log_probs)
    wrap_once(rollout_corr_helper.__name__, "compute_rollout_correction_weights", _with_own_levels)


def _with_log_probs(wrapped, instance, args, kwargs):
    given = dict(zip(("old_log_prob", "rollout_log_prob"), args, strict=False)) | kwargs
    with set_within(_log_probs, (given["old_log_prob"], given["rollout_log_prob"])):
        return wrapped(*args, **kwargs)


def _with_own_levels(wrapped, instance, args, kwargs):
    level = kwargs.get("rollout_is", args[2] if len(args) > 2 else None)
    return (_own_weights if level in WEIGHT_KINDS else wrapped)(*args, **kwargs)


def _own_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: object = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    require_plain_weights(rollout_is_batch_normalize, rollout_is)
    kind = WEIGHT_KINDS[rollout_is]
    kind.bounds(rollout_is_threshold, WEIGHT_THRESHOLD)
    policies = _log_probs.get() if kind.of_log_probs else (log_ratio,)
    weights_BT = kind.weights(*policies, response_mask, rollout_is_threshold)
    valid_BT = response_mask.bool()
    rows_B = valid_BT.any(dim=-1)
    weights, counted = weights_BT, valid_BT
    if kind.of_responses:  # one weight per response: at every token that counts, and 0 at the others
        weights, counted = weights_BT.amax(dim=-1), rows_B
    beyond = weights == 0
    if kind.bounds is require_threshold:  # what has a tiny ratio has a weight of 0 too
        log_of = torch.where(valid_BT, log_ratio, 0)
        log_of = log_of.sum(dim=-1, dtype=torch.float64) if kind.of_responses else log_of
        beyond = log_of > math.log(require_threshold(rollout_is_threshold))
    statistics = weight_statistics(weights, counted & weights.isfinite())
    numbers = {name.replace("actor/is_weight", "rollout_is"): item.value() for name, item in statistics.items()}
    metrics = {name: number for name, number in numbers.items() if not math.isnan(number)}
    metrics["rollout_is_beyond_fraction"] = (beyond & counted).sum().item() / max(int(counted.sum()), 1)
    metrics["rollout_is_nonfinite_responses"] = float((weights_BT.isnan().any(dim=-1) & rows_B).sum())
    return weights_BT, metrics
