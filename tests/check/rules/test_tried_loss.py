"""What a trial of the loss has shown becomes a finding, one for each cause, as grave as the config makes it."""

from dataclasses import replace

import pytest
from planted import composed

from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment, TriedLoss
from verl_precision.losses.invariance import Trial

SOUND = Trial(dict.fromkeys((2, 4, 8), 0.0), 0.0, 0.0, 0.0, "", False)
MEAN = replace(SOUND, cuts={2: 1.0, 4: 3.0, 8: 7.0})  # each micro-batch has a mean of its own
OWN = TriedLoss(SOUND, owner="mine.my_loss")
SEVERAL = "actor.ppo_micro_batch_size_per_gpu=4"
ONE = "actor.ppo_micro_batch_size_per_gpu=256"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def tried(**found) -> TriedLoss:
    return replace(OWN, trial=replace(SOUND, **found))


# Name, how serious, what came of the trial, overrides, words of the problem.
PLANTED = [
    ("loss-depends-on-cut", "error", tried(cuts=MEAN.cuts), SEVERAL, "1 (2 micro-batches), 3 (4 micro-batches), 7"),
    ("loss-depends-on-cut", "error", tried(cuts=MEAN.cuts, random=True), SEVERAL, "it draws at random"),
    ("loss-depends-on-cut", "warning", tried(cuts={2: 0.5}, random=True), SEVERAL, "it draws at random"),
    ("loss-depends-on-cut", "warning", tried(cuts={2: 0.03, 4: 5e-4}), SEVERAL, "changes by 0.03 (2 micro-batches)."),
    ("loss-depends-on-cut", "error", tried(ranks=0.5), SEVERAL, "0.5 (two ranks)"),
    ("loss-depends-on-cut", "warning", tried(ranks=0.5, cuts=MEAN.cuts), ONE, "it changes by 0.5 (two ranks)."),
    ("loss-depends-on-cut", "warning", tried(padding=0.5), ONE, "0.5 (more padding)"),
    ("loss-unusable", "error", tried(masked=0.2), SEVERAL, "0.2 of its size"),
    ("loss-unusable", "error", tried(nonfinite="8 micro-batches"), SEVERAL, "8 micro-batches"),
    ("loss-unusable", "error", TriedLoss(unusable="it returns float"), SEVERAL, "it returns float"),
    ("loss-unusable", "error", TriedLoss(problem="it raises X", owner="verl.y.z"), SEVERAL, "it raises X"),
    ("loss-not-tried", "unchecked", TriedLoss(problem="it raises X", owner="mine.my_loss"), SEVERAL, "it raises X"),
    ("loss-not-tried", "unchecked", TriedLoss(problem="it has not returned"), SEVERAL, "it has not returned"),
    ("loss-ignores-setting", "error", replace(OWN, ignores_weights=True), "correction.rollout_is=token", "not apply"),
]  # fmt: skip


def found(overrides: str, loss: TriedLoss | None):
    return find_faults(composed(overrides), Environment(loss=loss))


@pytest.mark.parametrize("row", PLANTED, ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}")
def test_it_is_found_once(row):
    name, severity, loss, overrides, words = row
    (fault,) = found(overrides, loss)
    assert (fault.name, fault.severity) == (name, severity) and words in fault.problem
    assert fault.allowed and fault.remedy and fault.problem.endswith(".")


@pytest.mark.parametrize(("loss", "overrides"), [
    (None, SEVERAL),
    (OWN, SEVERAL),
    (tried(cuts=MEAN.cuts), ONE),  # there is no cut
    (tried(cuts=MEAN.cuts), "actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=999999"),  # nor here
    (tried(ranks=0.5), f"{ONE} trainer.n_gpus_per_node=1 actor.ppo_mini_batch_size=32 {TP}=1"),  # nor a second rank
    (tried(cuts={2: 9e-4}), SEVERAL),
    (OWN, "actor.policy_loss.loss_mode=gspo"),  # somebody's own, whatever its name
])  # fmt: skip
def test_it_is_left_alone(loss, overrides):
    assert found(overrides, loss) == []


def test_what_another_rule_refuses_is_not_refused_again():
    loss = TriedLoss(problem="it raises ConfigurationError: ...", owner="verl_precision.losses.grpo.gspo")
    faults = found("actor.policy_loss.loss_mode=vp_pg_seq_is", loss)
    assert [fault.name for fault in faults] == ["loss-settings"]


def test_the_paper_of_gspo_is_one_finding_with_its_three_values():
    (fault,) = found("actor.policy_loss.loss_mode=gspo", None)
    assert "loss_agg_mode=token-mean, clip_ratio_low=0.2, clip_ratio_high=0.2" in fault.problem
    papers = "loss_agg_mode=seq-mean-token-mean, clip_ratio_low=3e-4, clip_ratio_high=4e-4 (arXiv 2507.18071"
    assert papers in fault.allowed
    words = " ".join(word for word in fault.remedy.split() if "=" in word and not word.startswith("estimator"))
    overrides = words.replace("actor_rollout_ref.", "").rstrip(",")
    assert found(f"actor.policy_loss.loss_mode=gspo {overrides}", None) == []
