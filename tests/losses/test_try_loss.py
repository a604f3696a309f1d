"""`try_loss` by losses whose dependence is known by hand; it needs torch alone, and no host."""

import pytest
import torch

from verl_precision.losses.invariance import CUTS, LENGTHS, Counts, gradients_differ, trial_batch, try_loss


def objective(part):
    ratio = (part.trainer_log_probs - part.old_log_probs).exp()
    return torch.where(part.response_mask, -(part.advantages + 0.0) * ratio, 0)


def sound(part, counts):
    return objective(part).sum() / counts.num_tokens * counts.dp_size


def mean_of_rows(part, counts):
    return objective(part).sum(dim=-1).mean()


def mean_of_all(part, counts):
    return (-part.advantages * (part.trainer_log_probs - part.old_log_probs).exp()).mean()


def sampled(part, counts):
    kept = torch.rand_like(part.trainer_log_probs) < 0.5
    return (2 * objective(part) * kept).sum() / counts.num_tokens * counts.dp_size


def test_a_sound_loss_does_not_depend_on_anything():
    trial = try_loss(sound, trial_batch())
    assert (*trial.cuts.values(), trial.ranks, trial.padding, trial.masked) == (0,) * 6
    assert (trial.nonfinite, trial.random, trial.changed) == ("", False, ())


def test_a_mean_of_the_rows_at_hand_grows_with_the_parts():
    """Half of the rows have half the denominator: twice the gradient, a difference of 1. Ranks are averaged: right."""
    trial = try_loss(mean_of_rows, trial_batch())
    assert trial.cuts == pytest.approx({cut: cut - 1 for cut in CUTS}) and trial.ranks == trial.padding == 0


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


def test_a_loss_that_writes_to_its_inputs_changes_its_own_copy():
    batch = trial_batch()
    kept = batch.of_all(torch.clone)

    def writing(part, counts):
        loss = sound(part._replace(response_mask=part.response_mask.clone()), counts)
        part.response_mask[:] = False
        part.advantages.add_(1.0)
        return loss

    trial = try_loss(writing, batch)
    assert trial.changed == ("advantages", "response_mask") and max(trial.cuts.values()) == 0
    assert all(torch.equal(tensor, getattr(kept, name)) for name, tensor in batch.tensors().items())


def test_two_losses_are_compared():
    batch = trial_batch(torch.float32, weighted=True)
    weighted = lambda part, counts: (objective(part) * part.rollout_is_weights).sum()  # noqa: E731
    assert gradients_differ(weighted, lambda part, counts: objective(part).sum(), batch)
    assert not gradients_differ(sound, sound, batch) and not gradients_differ(sampled, sampled, batch)


def test_the_batch_has_what_losses_stumble_over():
    batch = trial_batch()
    ratios = (batch.trainer_log_probs - batch.old_log_probs).exp()[batch.response_mask]
    assert ratios.min() < 0.5 and ratios.max() > 5 and {-1, 0, 1} == set(batch.advantages.sign().flatten().tolist())
    assert min(LENGTHS) == 1 and (batch.trainer_log_probs[batch.response_mask] == 0).sum() == 1
    assert batch.response_mask.sum() == sum(LENGTHS) - 3, "three tokens within responses are masked"
    assert torch.equal(trial_batch().trainer_log_probs, batch.trainer_log_probs)
