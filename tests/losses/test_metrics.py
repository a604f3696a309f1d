"""A metric of pieces is that of the whole, through verl's own reduction; a plain number from a loss is averaged."""

import math

import numpy as np
import pytest
import torch
from conftest import loss_through_verl
from plain_equations import random_case

from verl_precision.losses.metrics import Statistic, merge

ESTIMATORS = ("pg_seq_tis", "pg_seq_mis", "grpo", "grpo_seq_mis", "gspo")


def reduced_by_verl(metrics_of_ranks):
    """What verl does: one list of micro-batches per rank, gathered, flattened, reduced over mini-batches."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY  # noqa: F401  (registers)
    from verl.utils.metric import AggregationType, Metric, reduce_metrics
    from verl.utils.py_functional import append_to_dict

    gathered: dict[str, list] = {}
    for micro_batches in metrics_of_ranks:
        accumulated: dict = {}
        for metrics in micro_batches:
            append_to_dict(accumulated, Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
        for key, value in accumulated.items():
            gathered.setdefault(key, []).append(value)
    mini_batch: dict[str, list] = {}
    append_to_dict(mini_batch, {key: Metric.aggregate_dp(value) for key, value in gathered.items()})
    return reduce_metrics(mini_batch)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pieces_give_the_metrics_of_the_whole(estimator):
    whole = random_case(11, spread=2e-3 if estimator == "gspo" else 0.25)
    _, expected = loss_through_verl(estimator, whole, whole.trainer)
    ranks = []
    for rank in torch.arange(16).split([10, 6]):  # ranks and micro-batches of unequal size
        pieces = [whole.rows(rows) for rows in rank.split(4)]
        ranks.append([loss_through_verl(estimator, piece, piece.trainer, whole)[1] for piece in pieces])
    found = reduced_by_verl(ranks)
    assert found.keys() == expected.keys()
    for key, metric in expected.items():
        assert found[key] == pytest.approx(metric.aggregate(), rel=1e-9, abs=1e-12), key


def test_verl_alone_makes_a_maximum_a_mean_of_maxima():
    assert reduced_by_verl([[{"weight_max": 1.0}, {"weight_max": 3.0}]])["weight_max"] == 2.0


def test_verls_own_metrics_pass_unchanged():
    from verl.utils.metric import AggregationType, Metric

    assert Metric.from_dict({"a": 1.0}, AggregationType.SUM)["a"].aggregation is AggregationType.SUM
    assert Metric.from_dict(data={"a": 1.0}, aggregation="max")["a"].aggregate() == 1.0
    ranks = [Metric("sum"), Metric("sum")]
    ranks[0].extend([1.0, 2.0])
    ranks[1].extend([3.0, 4.0])
    assert Metric.aggregate_dp(ranks) == 5.0
    with pytest.raises(ValueError, match="empty list"):
        Metric.aggregate_dp([])


def test_metrics_travel_between_processes():
    import pickle

    case = random_case(0)
    _, metrics = loss_through_verl("pg_seq_is", case, case.trainer)
    again = pickle.loads(pickle.dumps(metrics))
    assert {k: m.aggregate() for k, m in again.items()} == {k: m.aggregate() for k, m in metrics.items()}


def test_every_kind_by_hand():
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([6.0])

    def merged(kind, *parts, q=math.nan):
        return merge([Statistic(kind, torch.tensor(part), q) for part in parts]).value()

    assert merged("count", [2.0], [3.0]) == 5
    assert merged("mean", [3.0, 2.0], [6.0, 1.0]) == 3
    assert merged("max", [1.0], [6.0]) == 6
    assert merged("min", [1.0], [6.0]) == 1
    assert merged("ess", [3.0, 5.0, 2.0], [6.0, 36.0, 1.0]) == pytest.approx(81 / (41 * 3))
    assert merged("quantile", one.tolist(), two.tolist(), q=0.5) == 2
    assert merged("ess", [0.0, 0.0, 4.0]) == 0, "everything rejected: no effective sample"
    for kind, nothing in (("mean", [0.0, 0.0]), ("max", [-math.inf]), ("min", [math.inf]), ("quantile", [])):
        assert np.isnan(merged(kind, nothing, q=0.5)), kind
