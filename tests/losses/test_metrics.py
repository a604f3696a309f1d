"""A loss's metrics of pieces, merged, are those of the whole mini-batch."""

import pytest
import torch
from conftest import OURS, loss_through_verl
from plain_equations import random_case


@pytest.mark.parametrize("estimator", ["pg_seq_tis", "pg_seq_mis", "grpo", "grpo_seq_mis", "gspo"])
def test_pieces_give_the_metrics_of_the_whole(estimator):
    whole = random_case(11, spread=2e-3 if estimator == "gspo" else 0.25)
    _, expected = loss_through_verl(estimator, whole, whole.trainer)
    pieces = [whole.rows(rows) for rows in torch.arange(16).split([4, 4, 2, 4, 2])]
    found = [loss_through_verl(estimator, piece, piece.trainer, whole)[1] for piece in pieces]
    for key, metric in expected.items():
        merged = metric.init_list()
        for piece in found:
            merged.append(piece[key])
        assert merged.aggregate() == pytest.approx(metric.aggregate(), rel=1e-9, abs=1e-12), key


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
    zero_loss = metrics["actor/zero_loss_responses"].aggregate()
    assert 2 <= zero_loss <= silent
    if estimator in ("grpo", "gspo"):
        assert zero_loss == 2 < silent, "clipped responses have a loss"
    if estimator in ("pg_seq_mis", "grpo_seq_mis"):
        assert zero_loss > 2, "rejected ones have none"
