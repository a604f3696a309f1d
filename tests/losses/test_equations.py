"""Each preset through verl's own call: its gradient is automatic differentiation of the plain equation in float64.

A new preset is tested here and in test_invariance.py once its equation is in plain_equations.py.
"""

import doctest
import importlib

import pytest
import torch
from conftest import ESTIMATORS, OURS, gradient_through_verl, loss_through_verl
from plain_equations import case_for, plain_gradient, random_case, relative_error


@pytest.mark.parametrize("module", ["aggregation", "policy_gradient", "grpo", "registry"])
def test_examples_of_the_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"verl_precision.losses.{module}"))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_is_that_of_the_equation(estimator, seed):
    case = case_for(estimator, seed)
    if estimator == "dapo":  # verl's own loss wants no empty row
        case = case.rows(case.mask.any(dim=-1))
    found = gradient_through_verl(estimator, case)
    assert relative_error(found, plain_gradient(estimator, case)) < 1e-10
    assert not found[~case.mask].any()
    single = case.to(torch.float32)
    assert relative_error(gradient_through_verl(estimator, single), plain_gradient(estimator, single)) < 1e-5


def test_the_cases_are_not_easy():
    """The random batches reject, truncate and clip on both sides; a loss that did none of it would not pass above."""
    found: dict[str, float] = {}
    for estimator in OURS:
        case = case_for(estimator, 0)
        _, metrics = loss_through_verl(estimator, case, case.trainer)
        found |= {f"{estimator} {key}": metric.aggregate() for key, metric in metrics.items()}
    sides = [f"{name} actor/clip_fraction_{side}" for name in ("grpo", "gspo") for side in ("high", "low")]
    sides += [f"dppo_{kind} actor/clip_fraction_{side}" for kind in ("tv", "kl") for side in ("high", "low")]
    for key in ("pg_seq_tis actor/truncated_fraction", "pg_seq_mis actor/rejected_fraction", *sides):
        assert 0.05 < found[key] < 0.95, (key, found[key])
    assert found["grpo_token_tis actor/is_weight_max"] == 2.0
    for name in ("icepop", "geo_mask"):
        silent, sample = (found[f"{name} actor/{key}"] for key in ("zero_gradient_responses", "is_weight_ess_fraction"))
        assert 0.05 < silent / 16 or sample < 0.95
    assert (random_case(0).mask.sum(dim=-1) == 0).any()


@pytest.mark.parametrize("estimator", [name for name in OURS if name not in ("cispo", "gspo")])
def test_without_mismatch_at_the_first_update_all_are_reinforce(estimator):
    """θ = θ' and μ = π give ratios and weights 1: nothing is clipped, and the gradient is that of Σ log π(y) A."""
    case = random_case(4)
    case.proximal.copy_(case.trainer)
    case.rollout.copy_(case.trainer)
    assert relative_error(gradient_through_verl(estimator, case), plain_gradient("ratio_one", case)) < 1e-12
