"""DPPO where it is hard to compute, and beside verl's own."""

import math

import pytest
import torch
from composer import actor_config, compose_estimator
from loss_calls import call, composed

from verl_precision.losses.dppo import binary_kl


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


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
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
