"""The straight-through estimator, in float64, by automatic differentiation of the plain formula."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.losses.ratios import straight_through


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 1000))
def test_ratio_is_exp_alpha_and_gradient_is_the_training_forwards(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (tokens, 1), generator=generator)
    log_probs = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    shadow = log_probs.detach() + 0.1 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    rollout_log_probs = shadow - 0.3 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    alpha = shadow - rollout_log_probs

    ratio = (straight_through(shadow, log_probs) - rollout_log_probs).exp()
    torch.testing.assert_close(ratio, alpha.exp(), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(ratio.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((alpha.exp() * log_probs).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_infinite_values_make_no_nan_gradient():
    target = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = straight_through(torch.tensor([-torch.inf, torch.nan]), target)
    result.sum().backward()
    assert result.dtype == torch.float64 and target.grad.tolist() == [1.0, 1.0]
