"""Sums travel through verl's own metric functions, over micro-batches, ranks and mini-batches, and come out merged."""

import pickle

import pytest
import torch
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict

from verl_precision.integration.loss_metrics import keep_merged_metrics
from verl_precision.integration.summed_metrics import MISMATCH, CarriedSums
from verl_precision.mismatch.statistics import MismatchSums

GAPS = [[0.1, -0.2], [0.3], [-0.4, 0.5, 0.6], [0.7]]


def sums(gaps) -> MismatchSums:
    found = MismatchSums()
    rollout = torch.full((1, len(gaps)), -2.0, dtype=torch.float64)
    found.update(rollout + torch.tensor([gaps], dtype=torch.float64), rollout, torch.ones(1, len(gaps)))
    return found


def test_through_a_step_of_verl():
    keep_merged_metrics()
    ranks = []
    for rank in range(2):  # two micro-batches each, as postprocess_batch_func joins them
        joined: dict = {}
        for gaps in GAPS[2 * rank : 2 * rank + 2]:
            append_to_dict(joined, {MISMATCH: CarriedSums([sums(gaps)]), "pg_loss": Metric("mean", 1.0)})
        ranks.append(pickle.loads(pickle.dumps(joined)))
    output = {key: [rank[key] for rank in ranks] for key in ranks[0]}  # allgather_dict_into_dict
    step: dict = {}
    first = {key: Metric.aggregate_dp(value) for key, value in output.items()}  # train_mini_batch
    for mini_batch in (first, {"pg_loss": 1.0}):  # only the first one is measured
        append_to_dict(step, mini_batch)
    metrics = reduce_metrics(rename_dict(pickle.loads(pickle.dumps(step)), "actor/"))  # the driver
    carried = metrics["actor/" + MISMATCH]
    assert isinstance(carried, MismatchSums)
    whole = sums([gap for gaps in GAPS for gap in gaps])
    for key in ("mismatch/log_prob_gap_mean", "mismatch/k3_kl", "mismatch/log_prob_gap_max", "mismatch/tokens"):
        assert carried.metrics()[key] == pytest.approx(whole.metrics()[key], rel=1e-12)
    assert carried.metrics()["mismatch/responses"] == len(GAPS)
    assert metrics["actor/pg_loss"] == 1.0
