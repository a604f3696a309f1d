"""`try_loss` by losses whose dependence is known by hand; verl's, and more of ours: tests/check/test_loss_trial.py."""

import pytest
import torch

from verl_precision.losses.invariance import Counts, trial_batch, try_loss


def objective(part):
    ratio = (part.trainer_log_probs - part.old_log_probs).exp()
    return torch.where(part.response_mask, -(part.advantages + 0.0) * ratio, 0)


def mean_of_all(part, counts):
    return (-part.advantages * (part.trainer_log_probs - part.old_log_probs).exp()).mean()


def sampled(part, counts):
    kept = torch.rand_like(part.trainer_log_probs) < 0.5
    return (2 * objective(part) * kept).sum() / counts.num_tokens * counts.dp_size


def test_a_mean_of_all_columns_depends_on_padding_and_on_masked_tokens():
    trial = try_loss(mean_of_all, trial_batch())
    assert trial.padding == pytest.approx(1 - 16 / 21) and trial.masked > 0.1


def test_what_is_drawn_at_random_is_compared_by_its_means():
    state = torch.random.get_rng_state()
    trial = try_loss(sampled, trial_batch())
    assert trial.random and (*trial.cuts.values(), trial.ranks, trial.padding, trial.masked) == (0,) * 6
    biased = try_loss(lambda part, counts: sampled(part, Counts(8, int(part.response_mask.sum()))), trial_batch())
    assert biased.random and min(biased.cuts.values()) > 0.5
    assert torch.equal(torch.random.get_rng_state(), state)
