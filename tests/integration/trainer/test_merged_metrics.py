"""Statistics travel through verl's own metric functions and come out merged."""

import pickle

import pytest
import torch
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict

from verl_precision.integration.engine.measurement import MISMATCH
from verl_precision.integration.trainer import merged_metrics
from verl_precision.integration.trainer.merged_metrics import MergedMetric, metrics_of_loss
from verl_precision.losses.metrics import weight_statistics
from verl_precision.mismatch.statistics import MismatchStatistics

GAPS = [[0.1, -0.2], [0.3], [-0.4, 0.5, 0.6], [0.7]]


@pytest.fixture(autouse=True, scope="module")
def wrapped():
    merged_metrics.keep_merged_metrics()


def through_verl(ranks):
    """What verl does: join micro-batches on each rank, gather the ranks, append mini-batches, reduce in the driver."""
    joined = []
    for micro_batches in ranks:
        accumulated: dict = {}
        for metrics in micro_batches:
            append_to_dict(accumulated, Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
        joined.append(pickle.loads(pickle.dumps(accumulated)))
    mini_batch = {key: Metric.aggregate_dp([rank[key] for rank in joined]) for key in joined[0]}
    step: dict = {}
    append_to_dict(step, mini_batch)
    append_to_dict(step, {"pg_loss": 3.0})  # of another mini-batch, which is not measured
    return reduce_metrics(rename_dict(pickle.loads(pickle.dumps(step)), "actor/"))


def measured(gaps) -> MismatchStatistics:
    rollout = torch.full((1, len(gaps)), -2.0, dtype=torch.float64)
    trainer = rollout + torch.tensor([gaps], dtype=torch.float64)
    return MismatchStatistics.measure(trainer, rollout, torch.ones(1, len(gaps)))


def weights_of(gaps):
    return weight_statistics(torch.tensor(gaps).exp(), torch.ones(len(gaps), dtype=torch.bool))


def test_a_step_of_verl_gives_what_the_whole_batch_has():
    reported = [
        {**metrics_of_loss(weights_of(gaps)), MISMATCH: MergedMetric([measured(gaps)]), "pg_loss": 1.0} for gaps in GAPS
    ]
    found = through_verl([reported[:2], reported[2:]])
    whole = [gap for gaps in GAPS for gap in gaps]
    for name, statistic in weights_of(whole).items():
        assert found[name] == pytest.approx(statistic.value(), rel=1e-6), name
    mismatch, expected = found["actor/" + MISMATCH].metrics(), measured(whole).metrics()
    for key in ("mismatch/log_prob_gap_mean", "mismatch/k3_kl", "mismatch/log_prob_gap_max", "mismatch/tokens"):
        assert mismatch[key] == pytest.approx(expected[key], rel=1e-12)
    assert mismatch["mismatch/responses"] == len(GAPS)
    assert found["actor/pg_loss"] == 2.0


def test_mini_batches_are_merged_too_and_one_without_tokens_is_not_nan():
    """verl takes the mean over mini-batches: of 0/0 as well."""
    step: dict = {}
    for gaps in ([0.1, -0.2, 0.3], [], [0.4]):
        metrics = Metric.from_dict(metrics_of_loss(weights_of(gaps)), aggregation=AggregationType.MEAN)
        append_to_dict(step, {key: Metric.aggregate_dp([metric]) for key, metric in metrics.items()})
    found, expected = reduce_metrics({**step}), weights_of([0.1, -0.2, 0.3, 0.4])
    with merged_metrics.statistics_kept():
        kept = reduce_metrics({**step})
    for name, statistic in expected.items():
        assert found[name] == pytest.approx(statistic.value(), rel=1e-6), name
        assert type(found[name]) is float, "orjson, with which verl writes metrics, takes no other"
        assert kept[name].value() == found[name], "a statistic still"


def test_verls_own_metrics_pass_unchanged():
    assert Metric.from_dict({"a": 1.0}, AggregationType.SUM)["a"].aggregation is AggregationType.SUM
    assert Metric.from_dict(data={"a": 1.0}, aggregation="max")["a"].aggregate() == 1.0
    ranks = [Metric("sum"), Metric("sum")]
    ranks[0].extend([1.0, 2.0])
    ranks[1].extend([3.0, 4.0])
    assert Metric.aggregate_dp(ranks) == 5.0
    with pytest.raises(ValueError, match="empty list"):
        Metric.aggregate_dp([])
