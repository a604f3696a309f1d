"""alpha, beta and phantom clipping: hand-derived decisions. test_statistics.py has numpy on random batches."""

import math

import pytest
import torch

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.phantom import PhantomStatistics


def phantom_of(trainer, shadow, mu, advantages, *more):
    found = PhantomStatistics.measure(trainer, shadow, mu, torch.ones_like(mu), advantages, *more).metrics()
    return {name.removeprefix("phantom/"): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("alpha", "beta", "advantage", "expected"),  # expected: phantom, clipped, missed
    [  # ε_low = 0.2 (ln 0.8 = -0.2231), ε_high = 0.28 (ln 1.28 = 0.2469)
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
    ],
)
def test_decision_by_hand(alpha, beta, advantage, expected):
    mu = torch.full((1, 1), -3.0, dtype=torch.float64)
    found = phantom_of(mu + alpha + beta, mu + alpha, mu, torch.tensor([float(advantage)]))
    assert tuple(found[name] for name in ("fraction", "clip_fraction", "missed_fraction")) == expected
    assert found["alpha_mean"] == pytest.approx(alpha) and found["beta_mean"] == pytest.approx(beta)
    assert found["beta_beyond_clip_fraction"] == (beta > 0.2469 or beta < -0.22314)


def test_by_sign_and_by_probability():
    """μ = 0.5, 0.5, 1e-5, 1e-5; A = +, -, +, -; beta = 0, 0, 0.3, -0.3: both unlikely tokens are silenced."""
    mu = torch.tensor([[0.5, 0.5, 1e-5, 1e-5]], dtype=torch.float64).log()
    beta = torch.tensor([[0.0, 0.0, 0.3, -0.3]], dtype=torch.float64)
    found = phantom_of(mu + beta, mu, mu, torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    assert found["fraction"] == found["fraction_positive_advantage"] == found["fraction_negative_advantage"] == 0.5
    assert found["prob_0_1e-4/fraction"] == 1 and found["prob_1e-1_1/fraction"] == 0
    assert found["prob_0_1e-4/beta_abs_mean"] == pytest.approx(0.3)
    assert found["beta_mean_positive_advantage"] == pytest.approx(0.15)
    assert found["beta_mean_negative_advantage"] == pytest.approx(-0.15)
    assert "prob_1e-2_1e-1/fraction" not in found


def test_ratio_against_other_log_probs():
    """μ is 0.3 away from both forwards, so against μ the clip is alpha's; against the proximal ones it is beta's."""
    mu = torch.full((1, 1), -2.0, dtype=torch.float64)
    proximal, shadow = mu + 0.3, mu + 0.3
    for ratio_log_probs, expected in ((None, 0), (proximal, 1)):
        found = phantom_of(shadow + 0.26, shadow, mu, torch.ones(1), ratio_log_probs)
        assert found["fraction"] == expected
        assert found["alpha_mean"] == pytest.approx(0.3), "alpha is always against the rollout"


def test_clip_range_is_checked_and_one_clips_nothing_below():
    mu = torch.full((1, 1), -3.0)
    with pytest.raises(ConfigurationError, match="clip_ratio_low=0"):
        phantom_of(mu, mu, mu, torch.ones(1), None, 0)
    assert phantom_of(mu - 900, mu, mu, torch.tensor([-1.0]), None, 1.0)["clip_fraction"] == 0
