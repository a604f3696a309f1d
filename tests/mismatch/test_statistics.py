"""The statistics equal a plain float64 numpy computation, whatever is masked."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.statistics import log_prob_gap_statistics as statistics


def test_hand_computed():
    """Gaps ln 2 and -ln 2: |g| mean ln 2, mean 0, k3 = ((2 - ln 2 - 1) + (1/2 + ln 2 - 1)) / 2 = 1/4."""
    mu = torch.log(torch.tensor([[0.25, 0.5]]))
    pi = torch.log(torch.tensor([[0.5, 0.25]]))
    found = statistics(pi, mu, torch.ones(1, 2))
    assert found["mismatch/log_prob_gap_abs_mean"] == pytest.approx(math.log(2), rel=1e-6)
    assert found["mismatch/log_prob_gap_mean"] == pytest.approx(0, abs=1e-7)
    assert found["mismatch/k3_kl"] == pytest.approx(0.25, rel=1e-6)
    assert found["mismatch/probs_pearson"] == pytest.approx(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([1e-6, 1e-2, 1.0]))
def test_equals_numpy_on_jagged_batches(rows, columns, seed, gap):
    rng = np.random.default_rng(seed)
    mu = -rng.exponential(2.0, (rows, columns))
    pi = mu + gap * rng.standard_normal((rows, columns))
    mask = np.arange(columns) < rng.integers(0, columns + 1, rows)[:, None]
    found = statistics(torch.tensor(pi), torch.tensor(mu), torch.tensor(mask))
    if not mask.any():
        assert found == {}
        return
    g = (pi - mu)[mask]
    assert found["mismatch/log_prob_gap_abs_mean"] == pytest.approx(np.abs(g).mean(), rel=1e-9)
    assert found["mismatch/log_prob_gap_mean"] == pytest.approx(g.mean(), rel=1e-9, abs=1e-15)
    assert found["mismatch/k3_kl"] == pytest.approx((np.expm1(g) - g).mean(), rel=1e-6, abs=1e-16)
    if mask.sum() > 2:
        expected = np.corrcoef(np.exp(pi[mask]), np.exp(mu[mask]))[0, 1]
        assert found["mismatch/probs_pearson"] == pytest.approx(expected, rel=1e-6)


def test_identical_policies():
    mu = -torch.rand(3, 5)
    found = statistics(mu, mu.clone(), torch.ones(3, 5))
    assert found["mismatch/k3_kl"] == found["mismatch/log_prob_gap_abs_mean"] == 0
    assert found["mismatch/probs_pearson"] == pytest.approx(1)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_tokens_never_matter(junk):
    mu, mask = -torch.rand(2, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    pi = mu + 0.01
    clean = statistics(pi, mu, mask)
    assert statistics(pi.masked_fill(mask == 0, junk), mu.masked_fill(mask == 0, -junk), mask) == clean


def test_non_finite_values_on_valid_tokens_show():
    mu = -torch.rand(1, 3)
    pi = mu.clone()
    pi[0, 0] = float("nan")
    assert math.isnan(statistics(pi, mu, torch.ones(1, 3))["mismatch/k3_kl"])


def test_tiny_gap_keeps_its_digits_in_float32():
    """k3 of a gap of 1e-4 is 5e-9: e^g - g - 1 in float32 would be all rounding."""
    mu = torch.full((1, 1000), -1.0, dtype=torch.float64)
    found = statistics(mu + 1e-4, mu, torch.ones(1, 1000))
    assert found["mismatch/k3_kl"] == pytest.approx(5e-9, rel=1e-3)


def test_bad_input_is_named():
    with pytest.raises(ConfigurationError, match="one shape.*trainer \\(1, 2\\)"):
        statistics(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match="floating point.*int64"):
        statistics(torch.zeros(1, 2).long(), torch.zeros(1, 2), torch.ones(1, 2))
