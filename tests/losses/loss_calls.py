"""Losses as tests call them: by themselves, and those of the composed presets through verl's own call."""

import functools
import pickle

import torch
from composer import actor_config, compose_estimator
from omegaconf import DictConfig
from plain_equations import C_NORM, Case
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from verl_precision.losses import Aggregation
from verl_precision.presets import preset_names

ESTIMATORS = preset_names("estimator")
OURS = [name for name in ESTIMATORS if name != "dapo"]  # dapo is verl's own loss
PER_TOKEN = Aggregation(normalizer=1)
VERL_DEFAULT = "verl's default"  # vanilla, seq-mean-token-sum-norm, loss_scale_factor null


@functools.cache
def composed(estimator: str) -> DictConfig:
    """Return verl's config with the preset; nobody changes it."""
    overrides = [f"data.max_response_length={C_NORM}"]
    if estimator == VERL_DEFAULT:
        estimator, actor = "grpo", "actor_rollout_ref.actor"
        overrides += [f"{actor}.loss_scale_factor=null", f"{actor}.policy_loss.loss_mode=vanilla"]
    return compose_estimator(estimator, *overrides)


@functools.cache
def _typed(estimator: str) -> bytes:
    """Return verl's typed config of the actor, pickled: each of thousands of calls has counts of its own."""
    return pickle.dumps(actor_config(composed(estimator)))


def corrected(old: Tensor, rollout: Tensor, mask: Tensor, **settings):
    """Return weights, mask and metrics of verl's rollout-correction step."""
    log_probs = {"old_log_prob": torch.where(mask, old, 0), "rollout_log_prob": torch.where(mask, rollout, 0)}
    step = compute_rollout_correction_and_rejection_mask
    proto, new_mask, metrics = step(response_mask=mask, **log_probs, **settings)
    return None if proto is None else proto.batch["rollout_is_weights"], new_mask, metrics


def run(loss, trainer, other, advantages, mask=None, aggregation=PER_TOKEN, **settings):
    """Return value, gradient and metrics of a loss, without verl."""
    trainer = torch.as_tensor(trainer).clone().requires_grad_()
    mask = torch.ones_like(trainer) if mask is None else torch.as_tensor(mask)
    other, advantages = torch.as_tensor(other), torch.as_tensor(advantages)
    output = loss(trainer, other, advantages, mask, aggregation=aggregation, **settings)
    output.loss.backward()
    return output.loss.item(), trainer.grad, output.values()


def call(name: str, config, old: Tensor, trainer: Tensor, advantages: Tensor, mask: Tensor, weights=None, mode=None):
    """Call a loss that is registered with verl as `ppo_loss` does; return it with its metrics."""
    tensors = {"old_log_prob": old, "log_prob": trainer, "advantages": advantages, "response_mask": mask}
    settings = {"loss_agg_mode": mode or config.loss_agg_mode, "config": config, "rollout_is_weights": weights}
    return get_policy_loss_fn(name)(**tensors, **settings)


def loss_through_verl(estimator: str, case: Case, trainer: Tensor, whole: Case | None = None, dp_size: int = 1):
    """Call the loss of a preset as verl's `ppo_loss` does: weights from verl's rollout-correction step, then the loss.

    `case` holds the rows at hand, `whole` the global mini-batch if it is more; `trainer` is what wants a gradient.
    """
    whole = case if whole is None else whole
    counts = {"batch_num_tokens": int(whole.mask.sum()), "global_batch_size": len(whole.mask)}
    config = pickle.loads(_typed(estimator))
    config.global_batch_info.update(dp_size=dp_size, **counts)
    correction = composed(estimator).algorithm.rollout_correction
    weights, mask = None, case.mask
    if (correction.rollout_is or correction.rollout_rs) and case.mask.any():
        settings = {key: value for key, value in correction.items() if key not in ("bypass_mode", "loss_type")}
        weights, mask, _ = corrected(case.proximal, case.rollout, case.mask, **settings)
    old = case.rollout if correction.bypass_mode else case.proximal
    return call(config.policy_loss.loss_mode, config, old, trainer, case.advantages_BT, mask, weights)


def gradient_through_verl(estimator: str, case: Case, **kwargs) -> Tensor:
    trainer = case.trainer.clone().requires_grad_()
    loss, _ = loss_through_verl(estimator, case, trainer, **kwargs)
    (gradient,) = torch.autograd.grad(loss, trainer)
    return gradient
