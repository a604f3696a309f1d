"""Each preset through verl's own call: its gradient is automatic differentiation of the plain equation in float64."""

import pytest
import torch
from conftest import gradient_through_verl, loss_through_verl
from plain_equations import ESTIMATORS, plain_gradient, random_case, relative_error


def case_for(estimator: str, seed: int):
    case = random_case(seed, spread=2e-3 if estimator == "gspo" else 0.25)
    if estimator == "dapo":  # verl's own loss: it needs finite numbers where masked
        case = case.rows(case.mask.any(dim=-1))
        for tensor in (case.trainer, case.proximal, case.rollout):
            tensor[~case.mask] = -1.0
    return case


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_is_that_of_the_equation(estimator, seed):
    case = case_for(estimator, seed)
    expected = plain_gradient(estimator, case)
    assert relative_error(gradient_through_verl(estimator, case), expected) < 1e-10
    single = case.to(torch.float32)
    assert relative_error(gradient_through_verl(estimator, single), plain_gradient(estimator, single)) < 1e-5
    assert not gradient_through_verl(estimator, case)[~case.mask].any()


def test_the_cases_are_not_easy():
    """The random batches reject, truncate and clip on both sides; a loss that did none of it would not pass above."""
    found: dict[str, float] = {}
    for estimator in ESTIMATORS[:-1]:
        case = case_for(estimator, 0)
        _, metrics = loss_through_verl(estimator, case, case.trainer)
        found |= {f"{estimator} {key}": metric.aggregate() for key, metric in metrics.items()}
    for key in (
        "pg_seq_tis actor/truncated_fraction",
        "pg_seq_mis actor/rejected_fraction",
        "grpo actor/clip_fraction_high",
        "grpo actor/clip_fraction_low",
        "gspo actor/clip_fraction_high",
        "gspo actor/clip_fraction_low",
    ):
        assert 0.05 < found[key] < 0.95, (key, found[key])
    assert found["grpo_token_tis actor/is_weight_max"] == 2.0
    assert (random_case(0).mask.sum(dim=-1) == 0).any()


@pytest.mark.parametrize("estimator", ["pg_seq_is", "pg_seq_tis", "pg_seq_mis"])
def test_without_mismatch_policy_gradient_is_reinforce(estimator):
    """μ = π gives ρ = 1: all three are the gradient of Σ log π(y) A, and so is ratio_one."""
    case = random_case(3)
    case.rollout.copy_(case.trainer)
    assert relative_error(gradient_through_verl(estimator, case), plain_gradient("ratio_one", case)) < 1e-12


@pytest.mark.parametrize("estimator", ["grpo", "grpo_unclipped", "grpo_token_tis", "grpo_seq_mis"])
def test_at_the_first_update_without_mismatch_grpo_is_reinforce(estimator):
    """θ = θ' and μ = π give r = 1 and weights 1: nothing is clipped, ∇r = ∇log π."""
    case = random_case(4)
    case.proximal.copy_(case.trainer)
    case.rollout.copy_(case.trainer)
    assert relative_error(gradient_through_verl(estimator, case), plain_gradient("ratio_one", case)) < 1e-12
