"""The square of the log-ratio: its gradient through verl is that of the formula, and it cannot blow up."""

import math

import pytest
import torch
from composer import actor_config, compose_estimator
from loss_calls import call
from plain_equations import C_NORM, plain_gradient, random_case, relative_error

from verl_precision.base.errors import ConfigurationError
from verl_precision.losses import POLICY_LOSSES, Aggregation, gap_penalty
from verl_precision.losses.registry import LossInputs

SUM = Aggregation("seq-mean-token-sum-norm", normalizer=C_NORM)


@pytest.mark.parametrize("estimator", ["pg_seq_is", "grpo", "dppo_tv", "ratio_one"])
def test_any_loss_of_ours_gets_the_penalty_of_its_own_ratio(estimator):
    case, beta = random_case(3), 0.3
    given = f"data.max_response_length={C_NORM}", f"actor_rollout_ref.actor.policy_loss.dro_beta={beta}"
    config, trainer = actor_config(compose_estimator(estimator, *given)), case.trainer.clone().requires_grad_()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(case.mask.sum()), global_batch_size=len(case.mask))
    old = case.rollout if estimator in ("pg_seq_is", "dppo_tv") else case.proximal
    loss, metrics = call(config.policy_loss.loss_mode, config, old, trainer, case.advantages_BT, case.mask)
    (found,) = torch.autograd.grad(loss, trainer)

    plain = torch.where(case.mask, case.trainer, 0).requires_grad_()
    square = (plain - torch.where(case.mask, old, 0)).square()
    (expected,) = torch.autograd.grad(beta / 2 * square.sum() / (len(case.mask) * C_NORM), plain)
    assert relative_error(found, plain_gradient(estimator, case) + expected) < 1e-10
    assert not found[~case.mask].any()
    assert metrics["actor/gap_penalty"].aggregate() == pytest.approx((beta / 2 * square.sum() / case.mask.sum()).item())


def test_the_penalty_does_not_depend_on_the_split_and_is_held_where_it_would_overflow():
    case = random_case(5)
    whole = gap_penalty(case.trainer, case.rollout, case.mask, aggregation=SUM, beta=0.3).loss
    info = {"num_responses": len(case.mask), "num_tokens": int(case.mask.sum())}
    of_parts = Aggregation("seq-mean-token-sum-norm", normalizer=C_NORM, **info)
    halves = case.rows(slice(0, 5)), case.rows(slice(5, None))
    parts = [gap_penalty(half.trainer, half.rollout, half.mask, aggregation=of_parts, beta=0.3).loss for half in halves]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)
    trainer = torch.tensor([[1e30, -1.0], [-1.0, torch.nan], [-1.0, -1.5]]).requires_grad_()
    output = gap_penalty(trainer, torch.full((3, 2), -1.0), torch.ones(3, 2), aggregation=SUM, beta=2.0)
    output.loss.backward()
    assert output.loss.isfinite() and trainer.grad.isfinite().all() and not trainer.grad[1].any()
    assert trainer.grad[2].tolist() == [0, pytest.approx(2.0 * -0.5 / (3 * C_NORM))]


@pytest.mark.parametrize("beta", [0, -1e-3, math.nan, "much"])
def test_a_weight_that_is_no_positive_number_is_refused(beta):
    inputs = LossInputs(*(torch.full((1, 2), -1.0) for _ in range(4))).by_name()
    with pytest.raises(ConfigurationError, match=r"dro_beta=.*null, or a number > 0"):
        POLICY_LOSSES["vp_ratio_one"](inputs, SUM, gap_penalty=beta)
