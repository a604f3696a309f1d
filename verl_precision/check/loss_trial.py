"""Tries the policy loss of a config on the small batch of `losses/invariance.py`, called as verl's engine calls it."""

import inspect
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, open_dict
from torch import Tensor

from verl_precision.check.rules.rule import TriedLoss
from verl_precision.losses.invariance import (
    LENGTHS,
    Counts,
    Loss,
    UnusableLossError,
    gradients_differ,
    trial_batch,
    try_loss,
)
from verl_precision.losses.registry import POLICY_LOSSES, LossInputs
from verl_precision.losses.settings import NORM_MODE

KEYWORDS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights".split()


def tried_loss(config: DictConfig) -> TriedLoss | None:
    """Return the result of trying the loss of a config that verl accepts; None if it has no policy loss."""
    distilled = config.get("distillation") or {}
    if distilled.get("enabled") and not (distilled.get("distillation_loss") or {}).get("use_task_rewards", True):
        return None  # verl multiplies it by 0
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from verl_precision.integration.engine.policy_losses import AdaptedLoss

    name = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    loss = POLICY_LOSS_REGISTRY.get(name)
    if loss is None:
        return TriedLoss(problem="no loss of this name is registered here; only workers import model.external_lib")
    tried = TriedLoss(owner=_owner(loss), replaced=name in POLICY_LOSSES and not isinstance(loss, AdaptedLoss))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _outcome(config, loss, tried)
    except UnusableLossError as error:
        return replace(tried, unusable=str(error))
    except Exception as error:  # whatever a loss raises is the answer
        return replace(tried, problem=" ".join(f"it raises {type(error).__name__}: {error}".split())[:300])


def _outcome(config: DictConfig, loss: Any, tried: TriedLoss) -> TriedLoss:
    correction = config.algorithm.get("rollout_correction") or {}
    weighted = bool(correction.get("rollout_is")) and not correction.get("bypass_mode")
    try:
        inspect.signature(loss).bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise UnusableLossError(f"it cannot be called with {', '.join(KEYWORDS)}: {error}") from error
    call, batch = _as_verl_calls(loss, config), trial_batch(weighted=weighted)

    def unweighted(part: LossInputs, counts: Counts) -> Tensor:
        return call(part._replace(rollout_is_weights=None), counts)

    trial = try_loss(call, batch)
    return replace(tried, trial=trial, ignores_weights=weighted and not gradients_differ(call, unweighted, batch))


def _as_verl_calls(loss: Any, config: DictConfig) -> Loss:
    """Return a loss as verl's `ppo_loss` calls it: by keyword, with its typed config, which has the global counts.

    Without its constant the `norm` mode divides by a width, which a rule of its own says; here it has one.
    """
    from verl.utils.config import omega_conf_to_dataclass

    node, mode = deepcopy(config.actor_rollout_ref.actor), config.actor_rollout_ref.actor.loss_agg_mode
    with open_dict(node):
        if mode == NORM_MODE and node.get("loss_scale_factor") is None:
            node.loss_scale_factor = max(LENGTHS)
    actor: Any = omega_conf_to_dataclass(node)

    def call(part: LossInputs, counts: Counts) -> Tensor:
        actor.global_batch_info.update(
            dp_size=counts.dp_size, batch_num_tokens=counts.num_tokens, global_batch_size=counts.num_responses,
            loss_scale_factor=actor.loss_scale_factor,
        )  # fmt: skip
        new, old, advantages, mask, weights = part
        returned = loss(**dict(zip(KEYWORDS, (old, new, advantages, mask, mode, actor, weights), strict=True)))
        pair = tuple(returned) if isinstance(returned, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Mapping):
            kinds = f"({', '.join(type(each).__name__ for each in pair)})" if pair else type(returned).__name__
            raise UnusableLossError(f"it returns {kinds}, but verl expects a tensor and a dictionary of metrics")
        return pair[0]

    return call


def _owner(loss: Any) -> str:
    """Return the module that the function of a loss was written in, and its name."""
    from verl_precision.integration.engine.policy_losses import AdaptedLoss  # it waits until verl is imported

    function = loss.entry.function if isinstance(loss, AdaptedLoss) else loss
    named = function if hasattr(function, "__qualname__") else type(function)
    # `functools.wraps` copies the name of what it wraps, and not the globals
    return f"{getattr(function, '__globals__', {}).get('__name__', named.__module__)}.{named.__qualname__}"
