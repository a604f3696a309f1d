"""alpha, beta and phantom clipping: hand-derived decisions. test_statistics.py has numpy on random batches."""

import math

import pytest
import torch

from verl_precision.losses.clipping import ClipRange
from verl_precision.mismatch.phantom import PhantomStatistics

GRPO = ClipRange(False, math.log(0.8), math.log(1.28))
GSPO = ClipRange(True, math.log(1 - 3e-4), math.log(1 + 4e-4))
GHOSTS = "phantom_clipped_fraction"


def phantom_of(trainer, shadow, mu, advantages, clip=GRPO, **more):
    found = PhantomStatistics.measure(trainer, shadow, mu, torch.ones_like(mu), advantages, clip, **more).metrics()
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
    assert (found[GHOSTS], found["clipped_fraction"], found["missed_fraction"]) == expected
    assert found["alpha_mean"] == pytest.approx(alpha) and found["beta_mean"] == pytest.approx(beta)
    assert found["beta_beyond_clip_fraction"] == (beta > 0.2469 or beta < -0.22314)


def test_final_tokens_by_hand():
    """Log-ratios 0.3 are clipped where A > 0: in the first response the final token, in the second another one."""
    mu = torch.full((4, 2), -3.0, dtype=torch.float64)
    gaps = torch.tensor([[0.0, 0.3], [0.3, 0.0], [0.0, 0.3], [0.3, 0.3]], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0])
    assert phantom_of(mu + gaps, mu, mu, advantages)["final_token_clip_fraction"] == pytest.approx(2 / 3)
    ended = torch.tensor([True, True, True, False])
    for chunk_tokens in (1, None):
        found = phantom_of(mu + gaps, mu, mu, advantages, ended=ended, chunk_tokens=chunk_tokens)
        assert found["final_token_clip_fraction"] == 0.5 and found["clipped_fraction"] == 0.5
    assert "final_token_clip_fraction" not in phantom_of(mu + gaps, mu, mu, -advantages, ended=ended & (advantages > 0))
    by_shadow = phantom_of(mu + gaps, mu, mu, advantages, beta_in_ratio=False)
    assert by_shadow["final_token_clip_fraction"] == 0, "the loss sees a ratio of 1"


def test_the_ratio_of_a_response_clips_all_of_its_tokens_or_none():
    """GSPO's range is 3e-4, a token's gap often more: tokens beyond it that cancel are no reason to clip."""
    mu = torch.full((2, 2), -2.0, dtype=torch.float64)
    beta = torch.tensor([[0.05, -0.05], [0.05, -0.04]], dtype=torch.float64)  # means 0 and 5e-3
    found = phantom_of(mu + beta, mu, mu, torch.ones(2), GSPO)
    assert found[GHOSTS] == found["clipped_fraction"] == found["beta_beyond_clip_fraction"] == 0.5


def test_a_ratio_from_the_shadow_is_clipped_without_beta():
    """Alpha clips the first token; beta would have clipped the second, and kept the third from being clipped."""
    mu = torch.full((1, 3), -3.0, dtype=torch.float64)
    shadow = mu + torch.tensor([[0.3, 0.1, 0.3]], dtype=torch.float64)
    trainer = shadow + torch.tensor([[0.0, 0.2, -0.2]], dtype=torch.float64)
    found = phantom_of(trainer, shadow, mu, torch.ones(1), beta_in_ratio=False)
    assert found["clipped_fraction"] == pytest.approx(2 / 3) and found["avoided_fraction"] == pytest.approx(1 / 3)
    assert not {GHOSTS, "missed_fraction", "beta_beyond_clip_fraction"} & set(found)
