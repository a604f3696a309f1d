"""Every estimator preset trains in the real stack; the policy-gradient ones without an old-log-prob forward."""

import pytest
from variants import of_estimator

from verl_precision.presets import preset_names

BYPASS = {"pg_seq_is", "pg_seq_tis", "pg_seq_mis"}


@pytest.mark.parametrize("estimator", preset_names("estimator"))
def test_two_steps(run_quickstart, estimator):
    rows = run_quickstart(*of_estimator(estimator))
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        forward_seen = "actor/entropy" in row and "mismatch/k3_kl" in row  # both come from the old-log-prob forward
        assert forward_seen == (estimator not in BYPASS)
        if estimator in BYPASS:
            assert row["timing_s/old_log_prob"] < 0.2 * row["timing_s/update_actor"]
            assert abs(row["actor/is_weight_mean"] - 1) < 0.05, "on-policy, FP16: the importance weight is close to 1"
