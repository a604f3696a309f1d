"""The same mini-batch, cut in different ways; the parameter is a vector w with log π = given + features · w."""

import torch
from conftest import actor_config, loss_through_verl
from plain_equations import Case, random_case
from torch import Tensor

FEATURES = 5
VERL_DEFAULT = "verl's default"  # vanilla, seq-mean-token-sum-norm, loss_scale_factor null


def mini_batch(estimator: str) -> tuple[Case, Tensor]:
    case = random_case(7, spread=2e-3 if estimator == "gspo" else 0.25)
    if estimator in ("dapo", VERL_DEFAULT):
        for tensor in (case.trainer, case.proximal, case.rollout):
            tensor[~case.mask] = -1.0
    generator = torch.Generator().manual_seed(1)
    return case, torch.randn(*case.mask.shape, FEATURES, generator=generator, dtype=torch.float64)


def trimmed(case: Case, features: Tensor) -> tuple[Case, Tensor]:
    """Pad to the longest response at hand only, as verl's `ppo_loss` does with each micro-batch."""
    used = case.mask.any(dim=0).nonzero()
    width = int(used.max()) + 1 if used.numel() else 1
    tensors = (getattr(case, name)[:, :width] for name in ("trainer", "proximal", "rollout"))
    return Case(*tensors, case.advantages, case.mask[:, :width]), features[:, :width]


def widened(case: Case, features: Tensor, by: int) -> tuple[Case, Tensor]:
    pad = torch.nn.functional.pad
    tensors = (pad(getattr(case, name), (0, by), value=-7.0) for name in ("trainer", "proximal", "rollout"))
    return Case(*tensors, case.advantages, pad(case.mask, (0, by))), pad(features, (0, 0, 0, by))


def gradient(estimator: str, whole: Case, pieces: list[tuple[Case, Tensor]], dp_size: int = 1) -> Tensor:
    """Gradient with respect to w, accumulated over the pieces of one rank."""
    w = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    for case, features in pieces:
        trainer = case.trainer + features @ w
        if estimator == VERL_DEFAULT:
            loss = verl_default_loss(case, trainer, whole, dp_size)
        else:
            loss, _ = loss_through_verl(estimator, case, trainer, whole, dp_size)
        loss.backward()
    return w.grad


def verl_default_loss(case: Case, trainer: Tensor, whole: Case, dp_size: int) -> Tensor:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = actor_config(
        "grpo",
        "actor_rollout_ref.actor.loss_scale_factor=null",
        dp_size=dp_size,
        batch_num_tokens=int(whole.mask.sum()),
        global_batch_size=len(whole.mask),
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=case.proximal,
        log_prob=trainer,
        advantages=case.advantages_BT,
        response_mask=case.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    return loss
