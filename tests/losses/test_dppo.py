"""DPPO by hand, where it is hard to compute, and beside verl's own."""

import math

import pytest
import torch
from composer import actor_config, compose_estimator
from loss_calls import call, composed, run

from verl_precision.losses import dppo_kl, dppo_tv
from verl_precision.losses.dppo import binary_kl

LOSSES = {"dppo_tv": dppo_tv, "dppo_kl": dppo_kl}


def slopes_of(loss, trainer, rollout, advantage: float):
    """Return the slopes of one response of these probabilities, and the metrics."""
    trainer, rollout = (torch.tensor([row], dtype=torch.float64).log() for row in (trainer, rollout))
    _, gradient, metrics = run(loss, trainer, rollout, torch.tensor([advantage]).double())
    return -gradient[0], metrics


@pytest.mark.parametrize("loss", LOSSES.values())
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_rare_token_keeps_its_gradient_and_a_likely_one_loses_it(loss, advantage):
    """0.001 -> 0.002 doubles the ratio and moves hardly any probability; 0.5 -> 0.8 is what PPO's clip would cut too;
    0.9 -> 0.65 is within a ratio of 0.72. Each is masked only where the update would move it further.
    """
    trainer, rollout = [0.002, 0.8, 0.65], [0.001, 0.5, 0.9]
    slopes, metrics = slopes_of(loss, trainer, rollout, advantage)
    kept = [1, 0, 1] if advantage > 0 else [1, 1, 0]
    expected = [keep * advantage * new / old for keep, new, old in zip(kept, trainer, rollout, strict=True)]
    torch.testing.assert_close(slopes, torch.tensor(expected, dtype=torch.float64))
    assert metrics[f"actor/clip_fraction_{'high' if advantage > 0 else 'low'}"] == pytest.approx(1 / 3)


def test_the_ratio_is_truncated_at_c():
    slopes, metrics = slopes_of(dppo_tv, [0.1], [0.001], 1.0)
    assert slopes.item() == 20 and metrics["actor/truncated_fraction"] == 1
    assert metrics["actor/ratio_max"] == pytest.approx(100), "the ratio as it is (T6)"


@pytest.mark.parametrize(("trainer", "rollout", "expected"), [
    (0.8, 0.5, 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)),
    (1.0, 0.5, math.inf),
    (0.5, 1.0, math.log(2)),
    (1.0, 1.0, 0.0),
    (0.0, 0.5, math.inf),
])  # fmt: skip
def test_divergence_at_the_ends(trainer, rollout, expected):
    found = binary_kl(torch.tensor(trainer).double().log(), torch.tensor(rollout).double().log())
    assert found.item() == pytest.approx(expected)


def through_verl(name: str, trainer, old, config) -> float:
    """Return the slope of a single token with A = 1."""
    leaf, ones = torch.tensor([trainer]).requires_grad_(), torch.ones(1, 1)
    mode = "token-sum" if name.startswith("vp_") else "seq-mean-token-sum"
    call(name, config, torch.tensor([old]), leaf, ones, ones, mode=mode)[0].backward()
    return -leaf.grad.item()


@pytest.mark.parametrize("kind", LOSSES)
def test_verls_own_truncates_at_three(kind):
    """A ratio of 10 of a rare token: verl's 20 is never reached, because the setting it reads has a default of 3."""
    config = actor_config(composed(kind), dp_size=1, batch_num_tokens=1, global_batch_size=1)
    assert config.clip_ratio_c == 3.0, "verl's default"
    trainer, rollout = [math.log(1e-4)], [math.log(1e-5)]
    assert through_verl(kind, trainer, rollout, config) == pytest.approx(3.0)
    assert through_verl(f"vp_{kind}", trainer, rollout, config) == pytest.approx(10.0, rel=1e-5)


def test_verls_own_kl_does_not_see_a_token_that_becomes_certain():
    """μ = 0.9, 1 - π = 1e-13, which float32 log-probs hold: D is 2.7 nats, and 1.5 with verl's 1e-8. δ = 2."""
    overrides = ("data.max_response_length=1", "actor_rollout_ref.actor.clip_ratio_high=2.0")
    config = actor_config(compose_estimator("dppo_kl", *overrides), dp_size=1, batch_num_tokens=1, global_batch_size=1)
    trainer, rollout = [-1e-13], [math.log(0.9)]
    exact = binary_kl(torch.tensor(trainer), torch.tensor(rollout)).item()
    assert exact == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-13), rel=1e-5) and exact > 2
    assert through_verl("vp_dppo_kl", trainer, rollout, config) == 0
    assert through_verl("dppo_kl", trainer, rollout, config) > 0
