"""Each preset through verl's own call: its gradient is automatic differentiation of the plain equation in float64.

Then the metrics: those of pieces, merged, are those of the whole mini-batch. verl's `ppo_loss` on nested tensors:
tests/integration/engine/test_estimators_train.py.

A new preset is tested here and in test_invariance.py once its equation is in plain_equations.py.
"""

import math

import pytest
import torch
from loss_calls import ESTIMATORS, OURS, gradient_through_verl, loss_through_verl
from plain_equations import case_for, plain_gradient, random_case, relative_error


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
    clipping = ("grpo", "gspo", "dppo_tv", "dppo_kl")
    sides = [f"{name} actor/clip_fraction_{side}" for name in clipping for side in ("high", "low")]
    rejecting = [f"{name} actor/rejected_fraction" for name in ("pg_seq_mis", *MASKS)]
    masking = ("geo_mask actor/is_weight_ess_fraction", "icepop actor/is_weight_token_ess_fraction")
    for key in ("pg_seq_tis actor/truncated_fraction", *rejecting, *sides, *masking):
        assert 0.05 < found[key] < 0.95, (key, found[key])
    assert (random_case(0).mask.sum(dim=-1) == 0).any()


SAMPLES = {"actor/is_weight_ess_fraction", "actor/is_weight_token_ess_fraction"}
MASKS = ("off_policy_sequence_mask", "off_policy_sequence_mask_decoupled")
RESPONSES = ("pg_seq_mis", "grpo_seq_mis", "geo_mask", *MASKS)
TOKENS = ("grpo_token_tis", "icepop", "kpop", "dppo_tv", "dppo_kl")


@pytest.mark.parametrize(("estimator", "decides"), [
    *((name, "actor/is_weight_ess_fraction") for name in RESPONSES),
    *((name, "actor/is_weight_token_ess_fraction") for name in TOKENS),
    *((name, None) for name in ("grpo", "gspo", "trm")),
])  # fmt: skip
def test_the_effective_sample_is_of_responses_where_they_decide_and_of_tokens_where_those_do(estimator, decides):
    """T1. In the pieces a response may be alone, and its tokens alike: the whole says who decides."""
    case = case_for(estimator, 0)
    _, metrics = loss_through_verl(estimator, case, case.trainer)
    found = {key for key in SAMPLES & metrics.keys() if not math.isnan(metrics[key].aggregate())}
    assert found == ({decides} if decides else set())


@pytest.mark.parametrize("estimator", ["grpo_seq_mis", "pg_seq_mis"])
def test_two_long_responses_of_64_are_two_responses(estimator):
    """T1. 62 short ones are rejected: by tokens the effective sample would be 80 of 204."""
    case = random_case(0, responses=64, width=40)
    case.mask[:], case.mask[2:, 2:] = True, False
    for policy in (case.trainer, case.proximal, case.rollout):
        policy[:] = -1.0
    case.rollout[2:] = -4.0  # ρ = e^6
    _, metrics = loss_through_verl(estimator, case, case.trainer)
    assert metrics["actor/is_weight_ess_fraction"].aggregate() == pytest.approx(2 / 64)


@pytest.mark.parametrize("estimator", ["pg_seq_tis", "pg_seq_mis", "grpo", "grpo_seq_mis", "grpo_token_tis", "gspo"])
def test_pieces_give_the_metrics_of_the_whole(estimator):
    whole = random_case(11, spread=2e-3 if estimator == "gspo" else 0.25)
    _, expected = loss_through_verl(estimator, whole, whole.trainer)
    pieces = [whole.rows(rows) for rows in torch.arange(16).split([4, 4, 2, 4, 2])]
    found = [loss_through_verl(estimator, piece, piece.trainer, whole)[1] for piece in pieces]
    for key, metric in expected.items():
        merged = metric.init_list()
        for piece in found:
            merged.append(piece[key])
        assert merged.aggregate() == pytest.approx(metric.aggregate(), rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("estimator", [name for name in OURS if name != "trm"])  # verl's rejection leaves the mask
def test_responses_without_loss_or_gradient_are_counted(estimator):
    """Two responses without an advantage; of short ones with a wide spread, some are clipped or rejected as a whole."""
    case = random_case(5, responses=64, width=2, spread=1.0)
    case.advantages[3:5] = 0
    trainer = case.trainer.clone().requires_grad_()
    loss, metrics = loss_through_verl(estimator, case, trainer)
    (gradient,) = torch.autograd.grad(loss, trainer)
    silent = int((case.mask.any(dim=-1) & (gradient == 0).all(dim=-1)).sum())
    assert metrics["actor/zero_gradient_responses"].aggregate() == silent
    assert metrics["actor/zero_gradient_fraction"].aggregate() == silent / case.mask.any(dim=-1).sum().item()
    zero_loss = metrics["actor/zero_loss_responses"].aggregate()
    assert 2 <= zero_loss <= silent
    if estimator in ("grpo", "gspo"):
        assert zero_loss == 2 < silent, "clipped responses have a loss"
    if estimator in ("pg_seq_mis", "grpo_seq_mis"):
        assert zero_loss > 2, "rejected ones have none"
