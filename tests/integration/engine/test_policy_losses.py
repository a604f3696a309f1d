"""Registration with verl, a user's own loss, and what verl's side can get wrong: an error before any number."""

import math
import re

import forked
import pytest
import torch
from composer import actor_config, compose_estimator

from verl_precision.base.errors import ConfigurationError, RegistrationError
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.losses import POLICY_LOSSES, LossOutput, policy_loss
from verl_precision.losses.aggregation import Aggregation, aggregate

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
LOSS_CORRECTION = f"{ACTOR}.policy_loss.rollout_correction"


def call(loss, actor, **changes):
    """Call a registered loss as verl does."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    tensors = {"old_log_prob": zeros, "log_prob": zeros, "advantages": ones, "response_mask": ones}
    settings = {"config": actor, "loss_agg_mode": actor.loss_agg_mode, "rollout_is_weights": None}
    return get_policy_loss_fn(loss)(**{**tensors, **settings, **changes})


def errors(config) -> list[str]:
    return [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"]


def test_a_loss_names_the_tensor_that_it_misses_and_takes_no_others():
    pi = torch.full((1, 2), -1.0, requires_grad=True)
    batch = {"trainer_log_probs": pi, "rollout_log_probs": pi.detach() - 0.5, "response_mask": torch.ones(1, 2)}
    with pytest.raises(ConfigurationError, match="pg_seq_is needs advantages"):
        POLICY_LOSSES["vp_pg_seq_is"](batch, Aggregation("token-mean"))
    batch |= {"advantages": torch.ones(1), "proximal_log_probs": None}
    POLICY_LOSSES["vp_pg_seq_is"](batch, Aggregation("token-mean")).loss.backward()
    torch.testing.assert_close(pi.grad, torch.full((1, 2), -math.e / 2))


def test_registering_twice_changes_nothing_and_a_stranger_is_refused(monkeypatch):
    from verl.trainer.ppo import core_algos

    from verl_precision.integration.engine.policy_losses import register_losses

    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    register_losses(core_algos)
    assert core_algos.POLICY_LOSS_REGISTRY == before and "vp_grpo" in before
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {"vp_grpo": core_algos.agg_loss})
    monkeypatch.setattr("verl_precision.losses.registry._listeners", [])
    with pytest.raises(RegistrationError, match="'vp_grpo' is already registered by .*agg_loss"):
        register_losses(core_algos)


OWN_LOSS = """
from verl_precision.losses import LossOutput, policy_loss
from verl_precision.losses.aggregation import Aggregation, aggregate

@policy_loss("my_reinforce", "plain REINFORCE", "Williams 1992")
def my_reinforce(trainer_log_probs, advantages, response_mask, *, aggregation):
    return LossOutput(-aggregate(trainer_log_probs * advantages, response_mask, aggregation), {})
"""


def test_own_loss_by_external_module_is_chosen_by_name(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_LOSS)  # beside the script
    done = forked.run(
        "import verl\nfrom verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "print(get_policy_loss_fn('my_reinforce').entry.function.__module__, get_policy_loss_fn('gspo').__module__)",
        tmp_path,
        VERL_USE_EXTERNAL_MODULES="mine",
    )
    assert done.stdout.split() == ["mine", "verl.trainer.ppo.core_algos"], done.stderr


def test_own_loss_through_verl():
    name = "test_adapter_own"

    @policy_loss(name, "plain REINFORCE", "Williams 1992")
    def own(trainer_log_probs, advantages, response_mask, *, aggregation, scale=2.0):
        return LossOutput(-scale * aggregate(trainer_log_probs * advantages, response_mask, aggregation), {})

    config = actor_config(compose_estimator("grpo"))
    loss, metrics = call(name, config, log_prob=torch.full((2, 3), -1.0))
    assert loss.item() == pytest.approx(2.0 * 3 / config.loss_scale_factor) and metrics == {}
    policy_loss(name, "plain REINFORCE", "Williams 1992")(own)  # again: nothing happens
    with pytest.raises(RegistrationError, match="one loss per name"):
        policy_loss(name, "another", "-")(lambda trainer_log_probs: None)


@pytest.mark.parametrize("function", [lambda trainer_log_probs, entropy: None, lambda advantages: None])
def test_own_loss_with_unknown_parameter_is_refused(function):
    with pytest.raises(RegistrationError, match="Allowed: trainer_log_probs, and any of"):
        policy_loss("test_adapter_bad", "-", "-")(function)
    assert "test_adapter_bad" not in POLICY_LOSSES


@pytest.mark.parametrize(("estimator", "override", "message"), [
    ("pg_seq_is", f"{CORRECTION}.bypass_mode=False", "bypass_mode=False: loss_mode"),
    ("pg_seq_mis", f"{LOSS_CORRECTION}.bypass_mode=null", "bypass_mode=None: loss_mode"),
    ("pg_seq_tis", f"{LOSS_CORRECTION}.rollout_is_threshold='0.5_5'", "rollout_is_threshold=.0.5_5."),
    ("pg_seq_mis", f"{LOSS_CORRECTION}.rollout_is_threshold=0.55", "YAML reads 0.5_5 as 0.55"),
    ("off_policy_sequence_mask", f"{LOSS_CORRECTION}.rollout_rs_threshold=null", "rollout_rs_threshold=None"),
    ("off_policy_sequence_mask", f"{LOSS_CORRECTION}.rollout_rs_threshold=0", "rollout_rs_threshold=0: .*in nats"),
    ("grpo", f"{ACTOR}.loss_scale_factor=null", "loss_scale_factor=None"),
    ("grpo", f"{ACTOR}.clip_ratio_low=-0.2", "actor.clip_ratio_low=-0.2"),
])  # fmt: skip
def test_bad_setting_is_refused_by_the_loss_and_before_the_run(estimator, override, message):
    config = compose_estimator(estimator, override)
    with pytest.raises(ConfigurationError, match=message) as worker:
        call(f"vp_{estimator}", actor_config(config))
    before_the_run = errors(config)
    assert any(re.search(message, text) for text in before_the_run), before_the_run
    for text in (str(worker.value), *before_the_run):
        assert "Allowed: " in text and any(remedy in text for remedy in ("Set ", "Choose ")), text


@pytest.mark.parametrize(("estimator", "counts", "changes", "message"), [
    ("grpo", {"dp_size": 2}, {}, "num_responses.*dp_size=2"),
    ("pg_seq_is", {"dp_size": 2}, {}, "num_responses.*dp_size=2"),
    ("grpo", {"dp_size": 2, "global_batch_size": 4}, {"loss_agg_mode": "token-mean"}, "num_tokens"),
    ("pg_seq_is", {}, {"rollout_is_weights": torch.ones(2, 3)}, r"rollout_correction\.rollout_is computes weights"),
])  # fmt: skip
def test_call_that_cannot_work_is_refused(estimator, counts, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        call(f"vp_{estimator}", actor_config(compose_estimator(estimator), **counts), **changes)
