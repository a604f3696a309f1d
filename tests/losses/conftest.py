"""Configs of the composed presets, and the estimators through verl's own call."""

import functools
from collections.abc import Callable

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from plain_equations import C_NORM, Case
from torch import Tensor

import verl_precision.plugin  # noqa: F401  (verl loads it too; here whatever the order)

ANY_BATCH = (
    "hydra.searchpath=[pkg://verl_precision.presets]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    f"data.max_response_length={C_NORM}",
)


@functools.cache
def composed(estimator: str, *overrides: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*ANY_BATCH, f"+estimator={estimator}", *overrides])
    OmegaConf.resolve(config)
    return config


def actor_config(estimator: str, *overrides: str, **global_batch_info):
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(composed(estimator, *overrides).actor_rollout_ref.actor)
    actor.global_batch_info.update(loss_scale_factor=actor.loss_scale_factor, **global_batch_info)
    return actor


@pytest.fixture(name="composed")
def composed_fixture() -> Callable[..., DictConfig]:
    return composed


@pytest.fixture(name="actor_config")
def actor_config_fixture() -> Callable:
    return actor_config


def zero_where_masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0)


def loss_through_verl(estimator: str, case: Case, trainer: Tensor, whole: Case | None = None, dp_size: int = 1):
    """Call the loss of a preset as verl's `ppo_loss` does: weights from verl's rollout-correction step, then the loss.

    Args:
        case: the rows at hand.
        trainer: their log-probs, the tensor that wants a gradient.
        whole: the global mini-batch, if it is more than the rows at hand.
        dp_size: number of ranks.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    whole = case if whole is None else whole
    config = actor_config(
        estimator, dp_size=dp_size, batch_num_tokens=int(whole.mask.sum()), global_batch_size=len(whole.mask)
    )
    correction = composed(estimator).algorithm.rollout_correction
    weights, mask = None, case.mask
    if correction.rollout_is is not None and case.mask.any():
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=zero_where_masked(case.proximal, case.mask),
            rollout_log_prob=zero_where_masked(case.rollout, case.mask),
            response_mask=case.mask,
            **{k: v for k, v in correction.items() if k not in ("bypass_mode", "loss_type")},
        )
        weights = proto.batch["rollout_is_weights"]
    return get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=case.rollout if correction.bypass_mode else case.proximal,
        log_prob=trainer,
        advantages=case.advantages_BT,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )


def gradient_through_verl(estimator: str, case: Case, **kwargs) -> Tensor:
    trainer = case.trainer.clone().requires_grad_()
    loss, _ = loss_through_verl(estimator, case, trainer, **kwargs)
    (gradient,) = torch.autograd.grad(loss, trainer)
    return gradient
