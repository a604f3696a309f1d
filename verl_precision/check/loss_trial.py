"""Tries the policy loss of a config on the small batch of `losses/invariance.py`, called as verl's engine calls it.

A user's own loss runs in a separate process, because it may hang, print or end the process.
"""

import inspect
import multiprocessing
import os
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from verl_precision.check.rules.rule import TriedLoss
from verl_precision.losses import invariance
from verl_precision.losses.registry import LossInputs
from verl_precision.losses.settings import NORM_MODE

SECONDS = 10.0  # for a user's own loss: a trial takes a tenth of a second, an import more
KEYWORDS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights".split()


def tried_loss(config: DictConfig) -> TriedLoss | None:
    """Return the result of trying the loss of a config that verl accepts; None if it has no policy loss."""
    distilled = config.get("distillation") or {}
    if distilled.get("enabled") and not (distilled.get("distillation_loss") or {}).get("use_task_rewards", True):
        return None  # verl multiplies the policy loss by 0
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    loss = POLICY_LOSS_REGISTRY.get(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    is_own = loss is None or not _owner(loss).startswith(("verl.", "verl_precision."))
    return _in_child(config) if is_own or config.actor_rollout_ref.model.get("external_lib") else _try(config)


def _in_child(config: DictConfig) -> TriedLoss:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else TriedLoss(problem=f"it has not returned in {SECONDS:g} seconds")
    except EOFError:
        process.join()
        return TriedLoss(problem=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _answer(config: DictConfig, connection: Connection) -> None:
    sys.stdout = sys.stderr = nothing = open(os.devnull, "r+")
    for stream in range(3):  # the loss's input and output
        os.dup2(nothing.fileno(), stream)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    sys.path.insert(0, os.getcwd())  # `python -m` finds modules there, a console script does not
    connection.send(_try(config))


def _try(config: DictConfig) -> TriedLoss:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    tried = TriedLoss()
    try:
        with warnings.catch_warnings(action="ignore"):
            if imported := config.actor_rollout_ref.model.get("external_lib"):
                from verl.utils.import_utils import import_external_libs

                import_external_libs(OmegaConf.to_object(imported) if OmegaConf.is_config(imported) else imported)
            name = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
            if (loss := POLICY_LOSS_REGISTRY.get(name)) is None:
                return TriedLoss(problem="no loss of this name is registered, also not by model.external_lib")
            tried = TriedLoss(owner=_owner(loss))
            return _outcome(config, loss, tried)
    except invariance.UnusableLossError as error:
        return replace(tried, unusable=str(error))
    except Exception as error:  # any error of a loss is a result
        return replace(tried, problem=" ".join(f"it raises {type(error).__name__}: {error}".split())[:300])


def _outcome(config: DictConfig, loss: Any, tried: TriedLoss) -> TriedLoss:
    correction = config.algorithm.get("rollout_correction") or {}
    weighted = bool(correction.get("rollout_is")) and not correction.get("bypass_mode")
    try:
        inspect.signature(loss).bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise invariance.UnusableLossError(f"it cannot be called with {', '.join(KEYWORDS)}: {error}") from error
    call, batch = as_verl_calls(loss, config), invariance.trial_batch(weighted=weighted)
    trial, unweighted = invariance.try_loss(call, batch), batch._replace(rollout_is_weights=None)
    ignored = weighted and not invariance.gradients_differ(call, batch, unweighted)
    return replace(tried, trial=trial, ignores_weights=ignored)


def as_verl_calls(loss: Any, config: DictConfig) -> invariance.Loss:
    """Return a loss as verl's `ppo_loss` calls it: by keyword, with its typed config, which has the global counts.

    Without its constant the `norm` mode divides by a width; another rule reports that, and here the constant is set.
    """
    from verl.utils.config import omega_conf_to_dataclass

    node, mode = deepcopy(config.actor_rollout_ref.actor), config.actor_rollout_ref.actor.loss_agg_mode
    with open_dict(node):
        if mode == NORM_MODE and node.get("loss_scale_factor") is None:
            node.loss_scale_factor = max(invariance.LENGTHS)
    actor: Any = omega_conf_to_dataclass(node)

    def call(part: LossInputs, counts: invariance.Counts) -> Tensor:
        actor.global_batch_info.update(
            dp_size=counts.dp_size, batch_num_tokens=counts.num_tokens, global_batch_size=counts.num_responses,
            loss_scale_factor=actor.loss_scale_factor,
        )  # fmt: skip
        new, old, advantages, mask, weights = part
        returned = loss(**dict(zip(KEYWORDS, (old, new, advantages, mask, mode, actor, weights), strict=True)))
        pair = tuple(returned) if isinstance(returned, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Mapping):
            kinds = f"({', '.join(type(each).__name__ for each in pair)})" if pair else type(returned).__name__
            problem = f"it returns {kinds}, but verl expects a tensor and a dictionary of metrics"
            raise invariance.UnusableLossError(problem)
        return pair[0]

    return call


def _owner(loss: Any) -> str:
    """Return the module that defines the function of a loss, and the function's name."""
    from verl_precision.integration.engine.policy_losses import AdaptedLoss  # needs verl

    function = loss.entry.function if isinstance(loss, AdaptedLoss) else loss
    named = function if hasattr(function, "__qualname__") else type(function)
    # `functools.wraps` copies the name of the wrapped function, but not its globals
    return f"{getattr(function, '__globals__', {}).get('__name__', named.__module__)}.{named.__qualname__}"
