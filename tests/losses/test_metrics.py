"""A loss's metrics of pieces, merged, are those of the whole mini-batch."""

import pytest
import torch
from conftest import loss_through_verl
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
