"""The policy loss in force is tried: called as verl's engine calls it, on the small batch of `losses/invariance.py`.

verl's losses and this package's are called here. Anyone else's is called in a process of its own, which may hang, print
or end as it likes: nothing of it is left in this one.
"""

import inspect
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from verl_precision.check.rules.rule import TriedLoss
from verl_precision.integration.ledger import lost_symbols
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

ACTOR = "actor_rollout_ref.actor"
AGGREGATION, WEIGHTS = f"{ACTOR}.loss_agg_mode", "algorithm.rollout_correction.rollout_is"
SECONDS = 10.0  # for a loss that is not verl's nor ours: a trial takes a tenth of a second, an import more
KEYWORDS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights".split()
OTHER_MODE = {"token-sum": "token-mean"}  # what an aggregation is compared with; any other: token-sum


def tried_loss(config: DictConfig) -> TriedLoss | None:
    """Return what came of trying the loss of a config that verl accepts; None where no policy loss is in force."""
    distilled = config.get("distillation") or {}
    if distilled.get("enabled") and not (distilled.get("distillation_loss") or {}).get("use_task_rewards", True):
        return None  # verl multiplies it by 0
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    name = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    loss = POLICY_LOSS_REGISTRY.get(name)
    imported = config.actor_rollout_ref.model.get("external_lib")
    if imported and lost_symbols("check of losses"):
        return None
    if loss is not None and not imported and _owner(loss).startswith(("verl.", "verl_precision.")):
        return _try(config, name)
    return in_child(partial(_try, config, name, imported), SECONDS)


def in_child(function: Callable[[], TriedLoss], seconds: float) -> TriedLoss:
    """Return what a function returns in a process of its own, or why nothing came back."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, theirs), daemon=True)
    sys.stdout.flush()
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return TriedLoss(problem=f"it has not returned within {seconds:g} seconds")
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join(1)
        return TriedLoss(problem=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(function: Callable[[], TriedLoss], connection: Connection) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)  # not what this process does at them
    sys.stdout = sys.stderr = nothing = open(os.devnull, "r+")  # what the loss prints, a shell of its own included
    for stream in range(3):
        os.dup2(nothing.fileno(), stream)
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path.cwd()))  # `python -m` finds modules there, a console script does not
    # OpenMP's threads do not survive a fork: asked for work, the forking thread waits for ever. A new one has its own.
    with ThreadPoolExecutor(1) as executor:
        connection.send(executor.submit(function).result())


def _try(config: DictConfig, name: str, imported: Any = None) -> TriedLoss:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from verl_precision.integration.engine.policy_losses import AdaptedLoss

    tried = TriedLoss()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if imported:
                from verl.utils.import_utils import import_external_libs

                import_external_libs(OmegaConf.to_object(imported) if OmegaConf.is_config(imported) else imported)
            if (loss := POLICY_LOSS_REGISTRY.get(name)) is None:
                return TriedLoss(unusable="no loss of this name is registered, model.external_lib included")
            tried = TriedLoss(owner=_owner(loss), replaced=name in POLICY_LOSSES and not isinstance(loss, AdaptedLoss))
            return _outcome(config, loss, tried)
    except UnusableLossError as error:
        return replace(tried, unusable=str(error))
    except Exception as error:  # whatever a loss raises is the answer
        return replace(tried, problem=" ".join(f"it raises {type(error).__name__}: {error}".split())[:300])


def _outcome(config: DictConfig, loss: Any, tried: TriedLoss) -> TriedLoss:
    correction = config.algorithm.get("rollout_correction") or {}
    weighted = bool(correction.get("rollout_is")) and not correction.get("bypass_mode")
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    try:
        inspect.signature(loss).bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise UnusableLossError(f"it cannot be called with {', '.join(KEYWORDS)}: {error}") from error
    call = _as_verl_calls(loss, config, mode)
    try:
        batch = trial_batch(torch.float64, weighted)
        trial = try_loss(call, batch)
    except UnusableLossError:
        raise
    except Exception:  # it may take float32 alone, which verl gives it
        batch = trial_batch(torch.float32, weighted)
        trial = try_loss(call, batch)
    others = {AGGREGATION: _as_verl_calls(loss, config, OTHER_MODE.get(mode, "token-sum"))}
    if weighted:
        others[WEIGHTS] = _as_verl_calls(loss, config, mode, without_weights=True)
    ignored = tuple(setting for setting, other in others.items() if not gradients_differ(call, other, batch))
    return replace(tried, trial=trial, ignored=ignored)


def _as_verl_calls(loss: Any, config: DictConfig, mode: str, without_weights: bool = False) -> Loss:
    """Return a loss as verl's `ppo_loss` calls it: by keyword, with its typed config, which has the global counts.

    Without its constant the `norm` mode divides by a width, which a rule of its own says; here it has one.
    """
    from verl.utils.config import omega_conf_to_dataclass

    node = deepcopy(config.actor_rollout_ref.actor)
    with open_dict(node):
        node.loss_agg_mode = mode
        if mode == NORM_MODE and node.get("loss_scale_factor") is None:
            node.loss_scale_factor = max(LENGTHS)
    actor: Any = omega_conf_to_dataclass(node)

    def call(part: LossInputs, counts: Counts) -> Tensor:
        actor.global_batch_info.update(
            dp_size=counts.dp_size, batch_num_tokens=counts.num_tokens, global_batch_size=counts.num_responses,
            loss_scale_factor=actor.loss_scale_factor,
        )  # fmt: skip
        new, old, advantages, mask, weights = part._replace(rollout_is_weights=None) if without_weights else part
        returned = loss(**dict(zip(KEYWORDS, (old, new, advantages, mask, mode, actor, weights), strict=True)))
        pair = tuple(returned) if isinstance(returned, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Mapping):
            kinds = f"({', '.join(type(each).__name__ for each in pair)})" if pair else type(returned).__name__
            raise UnusableLossError(f"it returns {kinds}, and verl unpacks a tensor and a dictionary of metrics")
        return pair[0]

    return call


def _owner(loss: Any) -> str:
    """Return the function that a loss is: the module that it was written in, and its name."""
    from verl_precision.integration.engine.policy_losses import AdaptedLoss  # it waits until verl is imported

    while isinstance(loss, AdaptedLoss | partial):
        loss = loss.entry.function if isinstance(loss, AdaptedLoss) else loss.func
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    # `functools.wraps` copies the name of what it wraps, and not the globals
    return f"{getattr(loss, '__globals__', {}).get('__name__', named.__module__)}.{named.__qualname__}"
