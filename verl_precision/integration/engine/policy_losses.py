"""The adapter from verl's call of a loss to ours, and weights for verl's rollout-correction step.

`actor.policy_loss.loss_mode=<name of POLICY_LOSSES>`. verl's `old_log_prob` is recomputed by the trainer at θ', or, in
bypass mode, the rollout's. The worker does not know which. So a loss that needs the rollout's reads a copy of the
setting `bypass_mode` in its own config, which the presets bind to the original:
`actor.policy_loss.rollout_correction.bypass_mode`.

`algorithm.rollout_correction.rollout_is=vp_token_tis|vp_seq_mis|vp_geo_mask|vp_icepop|vp_kpop`: equations (9) and (10),
and three masks, are further levels beside verl's. They use the same step and the same settings, and reach the loss as
`rollout_is_weights`. docs/math.md explains why they are our own.
"""

import math
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError
from verl_precision.integration.ledger import already_registered, set_within, wrap_once
from verl_precision.integration.trainer.merged_metrics import MergedMetric, keep_merged_metrics, metrics_of_loss
from verl_precision.losses import settings as limits
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import weight_statistics
from verl_precision.losses.registry import LossInputs, PolicyLoss, on_registration
from verl_precision.losses.rollout_weights import WEIGHT_KINDS


def register_losses(core_algos: ModuleType) -> None:
    """Register every loss of `POLICY_LOSSES`, and those added later, with verl; once."""
    keep_merged_metrics()

    def register(name: str, entry: PolicyLoss) -> None:
        owner = core_algos.POLICY_LOSS_REGISTRY.get(name)
        if owner is None:
            core_algos.register_policy_loss(name)(AdaptedLoss(name, entry))
        elif not (isinstance(owner, AdaptedLoss) and owner.entry == entry):
            raise already_registered(f"policy loss {name!r}", owner)

    if not any(isinstance(owner, AdaptedLoss) for owner in core_algos.POLICY_LOSS_REGISTRY.values()):
        on_registration(register)


class AdaptedLoss:
    """A loss of `POLICY_LOSSES` with verl's calling convention."""

    def __init__(self, name: str, entry: PolicyLoss) -> None:
        self.name, self.entry = name, entry

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, MergedMetric]]:
        """Call the loss with [B, T] tensors and verl's ActorConfig, whose `global_batch_info` `ppo_loss` has filled."""
        needs = self.entry.parameters
        if rollout_is_weights is not None and "rollout_is_weights" not in needs:
            raise ConfigurationError(value=self.name, **limits.WORDS["weights not taken"])
        if "rollout_log_probs" in needs:
            correction = config.policy_loss.get("rollout_correction", None) or {}
            limits.require_bypass(correction.get("bypass_mode", None), self.name)
        if loss_agg_mode == limits.NORM_MODE:
            limits.require_normalizer(config.loss_scale_factor)
        info = config.global_batch_info
        aggregation = Aggregation(
            mode=loss_agg_mode,
            normalizer=config.loss_scale_factor,
            num_responses=info.get("global_batch_size"),
            num_tokens=info.get("batch_num_tokens"),
            dp_size=info.get("dp_size") or 1,
        )
        inputs = LossInputs(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights)
        options = limits.LossSettings.from_config(config, needs).arguments()
        output = self.entry(inputs.by_name(), aggregation, **options)
        return output.loss, metrics_of_loss(output.metrics)


# The log-probs of trainer and rollout for the weights being computed: verl passes on only their difference.
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
    limits.require_plain_weights(rollout_is_batch_normalize, rollout_is)
    kind = WEIGHT_KINDS[rollout_is]
    kind.bounds(rollout_is_threshold, limits.WEIGHT_THRESHOLD)
    policies = _log_probs.get() if kind.of_log_probs else (log_ratio,)
    weights_BT = kind.weights(*policies, response_mask, rollout_is_threshold)
    valid_BT = response_mask.bool()
    rows_B = valid_BT.any(dim=-1)
    weights, counted = weights_BT, valid_BT
    if kind.of_responses:  # one weight per response, at each token that counts; 0 at other tokens
        weights, counted = weights_BT.amax(dim=-1), rows_B
    beyond = weights == 0
    if kind.bounds is limits.require_threshold:  # a tiny ratio gives a weight of 0 too
        log_of = torch.where(valid_BT, log_ratio, 0)
        log_of = log_of.sum(dim=-1, dtype=torch.float64) if kind.of_responses else log_of
        beyond = log_of > math.log(limits.require_threshold(rollout_is_threshold))
    statistics = weight_statistics(weights, counted & weights.isfinite())
    numbers = {name.replace("actor/is_weight", "rollout_is"): item.value() for name, item in statistics.items()}
    metrics = {name: number for name, number in numbers.items() if not math.isnan(number)}
    metrics["rollout_is_beyond_fraction"] = (beyond & counted).sum().item() / max(int(counted.sum()), 1)
    metrics["rollout_is_nonfinite_responses"] = float((weights_BT.isnan().any(dim=-1) & rows_B).sum())
    return weights_BT, metrics
