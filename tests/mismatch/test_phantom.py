"""alpha, beta and phantom clipping: hand-derived decisions, and numpy on random batches."""

import functools
import math

import plain_statistics
import pytest
import torch
from batches import assert_close, jagged, padded, random_responses
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.phantom import PhantomSums


def measured(responses, against=None, chunk_tokens=None, layout=padded):
    tensors, mask = layout(responses) if layout is padded else (layout(responses), None)
    sums = PhantomSums()
    sums.update(
        *(tensors[name] for name in ("trainer", "shadow", "rollout")),
        mask,
        tensors["advantage"],
        None if against is None else tensors[against],
        chunk_tokens,
    )
    return sums


# ε_low = 0.2 (ln 0.8 = -0.2231), ε_high = 0.28 (ln 1.28 = 0.2469): alpha, beta, A -> phantom, clipped, missed
DECISIONS = {
    "beta alone clips": (0.0, 0.30, 1, (1, 1, 0)),
    "beta alone clips, A < 0": (0.0, -0.30, -1, (1, 1, 0)),
    "wrong side for A > 0": (0.0, -0.30, 1, (0, 0, 0)),
    "wrong side for A < 0": (0.0, 0.30, -1, (0, 0, 0)),
    "no advantage, no gradient to lose": (0.0, 0.30, 0, (0, 0, 0)),
    "no sign": (0.0, 0.30, math.nan, (0, 0, 0)),
    "alpha alone clips: rightly": (0.30, 0.0, 1, (0, 1, 0)),
    "together only": (0.15, 0.15, 1, (1, 1, 0)),
    "beta hides a true clip": (0.30, -0.20, 1, (0, 0, 1)),
    "beta hides a true clip, A < 0": (-0.30, 0.20, -1, (0, 0, 1)),
    "both inside": (0.10, 0.10, 1, (0, 0, 0)),
    "just inside ln 1.28": (0.0, 0.2468, 1, (0, 0, 0)),
    "just outside ln 1.28": (0.0, 0.2470, 1, (1, 1, 0)),
    "just inside ln 0.8": (0.0, -0.2231, -1, (0, 0, 0)),
    "just outside ln 0.8": (0.0, -0.2232, -1, (1, 1, 0)),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_decision_by_hand(case):
    alpha, beta, advantage, expected = DECISIONS[case]
    mu = torch.full((1, 1), -3.0, dtype=torch.float64)
    sums = PhantomSums(clip_low=0.2, clip_high=0.28)
    sums.update(mu + alpha + beta, mu + alpha, mu, torch.ones(1, 1), torch.tensor([float(advantage)]))
    found = sums.metrics()
    assert tuple(found[f"phantom/{name}"] for name in ("fraction", "clip_fraction", "missed_fraction")) == expected
    assert found["phantom/alpha_mean"] == pytest.approx(alpha) and found["phantom/beta_mean"] == pytest.approx(beta)
    assert found["phantom/beta_beyond_clip_fraction"] == (beta > 0.2469 or beta < -0.22314)


def test_by_sign_and_by_probability():
    """μ = 0.5, 0.5, 1e-5, 1e-5; A = +, -, +, -; beta = 0, 0, 0.3, -0.3: both unlikely tokens are silenced."""
    mu = torch.tensor([[0.5, 0.5, 1e-5, 1e-5]], dtype=torch.float64).log()
    beta = torch.tensor([[0.0, 0.0, 0.3, -0.3]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    sums = PhantomSums()
    sums.update(mu + beta, mu, mu, torch.ones(1, 4), advantages)
    found = {name.removeprefix("phantom/"): value for name, value in sums.metrics().items()}
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
        sums = PhantomSums()
        sums.update(shadow + 0.26, shadow, mu, torch.ones(1, 1), torch.ones(1), ratio_log_probs)
        assert sums.metrics()["phantom/fraction"] == expected
        assert sums.metrics()["phantom/alpha_mean"] == pytest.approx(0.3), "alpha is always against the rollout"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 8),
    st.integers(0, 30),
    st.integers(0, 10**6),
    st.sampled_from([1e-4, 0.2, 3.0, 500.0]),
    st.sampled_from([None, "proximal"]),
    st.sampled_from([1, 50, None]),
)
def test_equals_numpy(rows, longest, seed, gap, against, chunk_tokens):
    responses = random_responses(rows, longest, seed, gap)
    expected = plain_statistics.phantom(responses, against=against or "rollout")
    assert_close(measured(responses, against, chunk_tokens).metrics(), expected)
    if rows:
        assert_close(measured(responses, against, chunk_tokens, jagged).metrics(), expected)


def test_merged_micro_batches_are_the_whole():
    responses = random_responses(20, 30, seed=0, gap=0.2)
    states = [measured(responses[i : i + 7]).to_tensor() for i in range(0, 20, 7)]
    merged = functools.reduce(PhantomSums.merge, map(PhantomSums.from_tensor, states))
    assert_close(merged.metrics(), plain_statistics.phantom(responses))
    with pytest.raises(ConfigurationError, match="clip_high=0.28.*merged with clip_high=0.3"):
        merged.merge(PhantomSums(clip_high=0.3))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.5])
@pytest.mark.parametrize("name", ["trainer", "shadow", "rollout", "proximal"])
def test_bad_tokens_are_counted_and_left_out(bad, name):
    responses = random_responses(6, 20, seed=1, gap=0.2, shortest=2)
    responses[1][name][0] = bad
    found = measured(responses, "proximal").metrics()
    assert_close(found, plain_statistics.phantom(responses, against="proximal"))
    assert found["phantom/positive_log_probs" if bad == 0.5 else "phantom/nonfinite_tokens"] == 1


def test_nothing_to_measure():
    sums = PhantomSums()
    empty = torch.zeros(2, 3)
    sums.update(empty, empty, empty, empty, torch.ones(2))
    assert sums.metrics() == dict.fromkeys(
        ("phantom/tokens", "phantom/nonfinite_tokens", "phantom/positive_log_probs"), 0
    )


def test_clip_range_is_checked_and_one_clips_nothing_below():
    with pytest.raises(ConfigurationError, match="clip_ratio_low=0"):
        PhantomSums(clip_low=0)
    mu = torch.full((1, 1), -3.0)
    sums = PhantomSums(clip_low=1.0)
    sums.update(mu - 900, mu, mu, torch.ones(1, 1), torch.tensor([-1.0]))
    assert sums.metrics()["phantom/clip_fraction"] == 0
