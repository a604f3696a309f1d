"""Every estimator preset trains in the real stack; the policy-gradient ones without an old-log-prob forward."""

import pytest
from variants import of_estimator

from verl_precision.compare.results import read_metrics
from verl_precision.presets import preset_names

BYPASS = {"pg_seq_is", "pg_seq_tis", "pg_seq_mis"}


@pytest.mark.parametrize("estimator", preset_names("estimator"))
def test_it_trains(run_quickstart, estimator, request):
    if estimator == "grpo":  # the quickstart's own; its FP16 run is there anyway
        folder, _, _ = request.getfixturevalue("comparison")
        rows = read_metrics(folder / "fp16" / "metrics.jsonl")
    else:
        rows = run_quickstart(*of_estimator(estimator))
    assert [row["step"] for row in rows[:2]] == [1, 2]
    for row in rows[:2]:
        assert row["actor/grad_norm"] > 0
        assert ("actor/entropy" in row) == (estimator not in BYPASS), "it comes from the old-log-prob forward"
        assert 0 < row["mismatch/k3_kl"] < 1e-6, "measured by the driver, or in bypass mode by the worker"
        assert row["precision/loss_scale"] == (65536 if estimator == "grpo" else 1024) and row["alarm/active"] == 0
        if estimator in BYPASS:
            assert row["timing_s/old_log_prob"] < 0.2 * row["timing_s/update_actor"]
            assert abs(row["actor/is_weight_mean"] - 1) < 0.05, "on-policy, FP16: the importance weight is close to 1"
