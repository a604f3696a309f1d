"""alpha, beta and phantom clipping: hand-derived decisions. test_statistics.py has numpy on random batches."""

import math

import pytest
import torch
from batches import BY_TOKEN

from verl_precision.mismatch.phantom import PhantomStatistics


# Expected: phantom, clipped, missed; with ε_low = 0.2 (ln 0.8 = -0.2231) and ε_high = 0.28 (ln 1.28 = 0.2469).
@pytest.mark.parametrize(("alpha", "beta", "advantage", "expected"), [
    pytest.param(0.0, 0.30, 1, (1, 1, 0), id="beta alone clips"),
    pytest.param(0.0, -0.30, -1, (1, 1, 0), id="beta alone clips, A < 0"),
    pytest.param(0.0, -0.30, 1, (0, 0, 0), id="wrong side for A > 0"),
    pytest.param(0.0, 0.30, -1, (0, 0, 0), id="wrong side for A < 0"),
    pytest.param(0.0, 0.30, 0, (0, 0, 0), id="no advantage, no gradient to lose"),
    pytest.param(0.0, 0.30, math.nan, (0, 0, 0), id="no sign"),
    pytest.param(0.30, 0.0, 1, (0, 1, 0), id="alpha alone clips: rightly"),
    pytest.param(0.15, 0.15, 1, (1, 1, 0), id="together only"),
    pytest.param(0.30, -0.20, 1, (0, 0, 1), id="beta hides a true clip"),
    pytest.param(-0.30, 0.20, -1, (0, 0, 1), id="beta hides a true clip, A < 0"),
    pytest.param(0.10, 0.10, 1, (0, 0, 0), id="both inside"),
    pytest.param(0.0, 0.2468, 1, (0, 0, 0), id="just inside ln 1.28"),
    pytest.param(0.0, 0.2470, 1, (1, 1, 0), id="just outside ln 1.28"),
    pytest.param(0.0, -0.2231, -1, (0, 0, 0), id="just inside ln 0.8"),
    pytest.param(0.0, -0.2232, -1, (1, 1, 0), id="just outside ln 0.8"),
])  # fmt: skip
def test_decision_by_hand(alpha, beta, advantage, expected):
    mu = torch.full((1, 1), -3.0, dtype=torch.float64)
    tensors = mu + alpha + beta, mu + alpha, mu, torch.ones_like(mu), torch.tensor([float(advantage)])
    metrics = PhantomStatistics.measure(*tensors, BY_TOKEN).metrics()
    found = {name.removeprefix("phantom/"): value for name, value in metrics.items()}
    assert (found["phantom_clipped_fraction"], found["clipped_fraction"], found["missed_fraction"]) == expected
    assert found["alpha_mean"] == pytest.approx(alpha) and found["beta_mean"] == pytest.approx(beta)
    assert found["beta_beyond_clip_fraction"] == (beta > 0.2469 or beta < -0.22314)
