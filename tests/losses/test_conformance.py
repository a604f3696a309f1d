"""Losses with faults that are known by hand, verl's and ours as tests of their own, and ours beside polgrad's."""

import math
import re

import pytest
import torch
from composer import compose_estimator
from polgrad import registry, testing
from polgrad.aggregate import Aggregation as Mode
from polgrad.losses import ClipConfig, PolicyLossConfig, RatioKind, SurrogateKind
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl_precision.base.errors import CheckFailedError
from verl_precision.check.loss_trial import as_verl_calls
from verl_precision.losses import POLICY_LOSSES, Aggregation, assert_conforms
from verl_precision.losses.invariance import Counts, trial_batch, try_loss
from verl_precision.losses.registry import LossInputs

CONSTANTS = set("cispo cispo_rollout dppo_kl dppo_tv pg_seq_is pg_seq_mis pg_seq_tis ratio_one".split())
OURS = [name.removeprefix("vp_") for name in POLICY_LOSSES]


def of_verl(name, estimator="grpo"):
    config = compose_estimator(estimator, *([f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"] if name else []))
    return as_verl_calls(get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode), config)


@pytest.mark.parametrize("estimator", OURS)
def test_each_of_ours_conforms(estimator):
    assert not assert_conforms(of_verl("", estimator), stops_gradients=estimator in CONSTANTS).random


def test_verls_vanilla_conforms_and_its_geo_mean_does_not():
    assert_conforms(of_verl("vanilla"))
    for name, problem in {
        "geo_mean": "8 micro-batches 7",
        "gspo": "of -inf in masked tokens nan",
    }.items():
        with pytest.raises(CheckFailedError, match=problem):
            assert_conforms(of_verl(name))


def objective(part):
    ratio = torch.where(part.response_mask, part.trainer_log_probs - part.old_log_probs, 0).exp()
    return torch.where(part.response_mask, -part.advantages * ratio, 0)


def right(part, counts):
    return objective(part).sum() / counts.num_tokens * counts.dp_size


def sampled(part, counts):
    return (
        (2 * objective(part) * (torch.rand_like(part.old_log_probs) < 0.5)).sum() / counts.num_tokens * counts.dp_size
    )


# A loss of a part and its counts; by what its gradient changes, by hand where a number stands.
FAULTS = {
    "8 micro-batches 7": lambda part, counts: objective(part).sum(dim=-1).mean() * counts.dp_size,
    f"more padding {1 - 16 / 21:.2g}": lambda part, counts: objective(part).mean(),
    "another order": lambda part, counts: objective(part)[0].sum() * len(part.old_log_probs) / counts.num_responses,
    "two ranks 0.5": lambda part, counts: right(part, counts) / counts.dp_size,
    "different numbers in masked tokens": lambda part, counts: right(part, counts) * part.advantages.abs().sum(),
    "old log-probs of -inf in masked": lambda part, counts: right(part, counts) * (1 + 0 * part.old_log_probs.sum()),
    "differences of the value": lambda part, counts: (
        objective(part).detach() * torch.where(part.response_mask, part.trainer_log_probs, 0)
    ).sum() / counts.num_tokens * counts.dp_size,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_loss_is_named(fault):
    assert assert_conforms(right).order < 1e-12
    with pytest.raises(CheckFailedError, match=re.escape(fault)):
        assert_conforms(FAULTS[fault])


def test_a_mean_of_all_columns_depends_on_padding_and_on_masked_tokens():
    def mean_of_all(part, counts):
        return (-part.advantages * (part.trainer_log_probs - part.old_log_probs).exp()).mean()

    trial = try_loss(mean_of_all, trial_batch())
    assert trial.padding == pytest.approx(1 - 16 / 21) and trial.masked > 0.1


def test_what_is_drawn_at_random_is_compared_by_its_means():
    state = torch.random.get_rng_state()
    trial = assert_conforms(sampled)
    assert trial.random and (*trial.cuts.values(), trial.ranks, trial.padding, trial.masked, trial.order) == (0,) * 7
    biased = try_loss(lambda part, counts: sampled(part, Counts(8, int(part.response_mask.sum()))), trial_batch())
    assert biased.random and min(biased.cuts.values()) > 0.5
    assert torch.equal(torch.random.get_rng_state(), state)


def parts(surrogate, clip=None, aggregation=Mode.SEQ_MEAN_TOKEN_MEAN):
    return PolicyLossConfig(surrogate=surrogate, ratio=RatioKind.TOKEN, aggregation=aggregation, clip=clip)


# polgrad's algorithm or its parts -> our loss and its settings; a value with a constant factor is another one.
GRPO, CISPO = {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 1.0, "clip_high": 5.0}
PINNED = {
    "grpo": (registry.get("grpo").loss, "vp_grpo", {"clip_low": 0.2, "clip_high": 0.2}),
    "dapo": (registry.get("dapo").loss, "vp_grpo", GRPO),
    "gspo": (registry.get("gspo").loss, "vp_gspo", {}),
    "gspo_token, gradient": (registry.get("gspo_token").loss, "vp_gspo", {}),
    "clip by response": (parts(SurrogateKind.PG_CLIP, ClipConfig(0.2, 0.28)), "vp_grpo", GRPO),
    "no clip": (parts(SurrogateKind.PG), "vp_grpo_unclipped", {}),
    "no ratio, gradient": (parts(SurrogateKind.REINFORCE), "vp_ratio_one", {}),
    "cispo, gradient": (parts(SurrogateKind.CISPO, ClipConfig(None, 5.0), Mode.TOKEN_MEAN), "vp_cispo", CISPO),
}


@pytest.mark.parametrize("case", PINNED)
def test_a_loss_that_polgrad_knows_is_polgrads(case):
    reference, name, settings = PINNED[case]
    modes = {Mode.TOKEN_MEAN: "token-mean", Mode.SEQ_MEAN_TOKEN_MEAN: "seq-mean-token-mean"}

    def ours(*, logprobs, old_logprobs, advantages, response_mask):
        inputs = LossInputs(logprobs, old_logprobs, advantages, response_mask)
        return POLICY_LOSSES[name](inputs.by_name(), Aggregation(modes[reference.aggregation]), **settings).loss

    value = math.inf if case.endswith("gradient") else 1e-13
    assert testing.assert_conforms(ours, reference, loss_rtol=value).max_grad_rel_diff < 1e-13
