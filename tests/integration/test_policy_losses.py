"""Registration with verl, a user's own loss, and what verl's side can get wrong: an error before any number."""

import re

import pytest
import torch
from conftest import actor_config

from verl_precision.errors import ConfigurationError, RegistrationError
from verl_precision.losses import POLICY_LOSSES, LossOutput, policy_loss
from verl_precision.losses.aggregation import aggregate
from verl_precision.rules.book import find_faults
from verl_precision.rules.rule import Environment

NAMES = {"pg_seq_is", "pg_seq_tis", "pg_seq_mis", "grpo", "vp_gspo", "grpo_unclipped", "ratio_one"}


def call(estimator, config, **changes):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    arguments = {
        "old_log_prob": zeros,
        "log_prob": zeros,
        "advantages": ones,
        "response_mask": ones,
        "loss_agg_mode": config.loss_agg_mode if config is not None else "token-mean",
        "config": config,
        "rollout_is_weights": None,
    }
    return get_policy_loss_fn(estimator)(**{**arguments, **changes})


def test_registry_lists_every_loss_with_line_and_equation():
    assert set(POLICY_LOSSES) >= NAMES
    for name in NAMES:
        entry = POLICY_LOSSES[name]
        assert callable(entry.function) and entry.summary and "eq. (" in entry.equation
    with pytest.raises(TypeError):
        POLICY_LOSSES["mine"] = None


def test_importing_the_losses_imports_nothing_of_verl(run_python, root):
    done = run_python(
        "import sys, verl_precision.losses\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('verl', 'hydra', 'ray')])",
        PYTHONPATH=str(root),
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_is_there():
    import verl_precision.losses as losses

    for name in losses.__all__:
        assert getattr(losses, name) is not None


def test_name_of_another_package_is_refused(run_python, root):
    done = run_python(
        "import verl\n"
        "from verl.trainer.ppo import core_algos\n"
        "def stranger(**kwargs): pass\n"
        "core_algos.POLICY_LOSS_REGISTRY.clear()\n"
        "core_algos.register_policy_loss('grpo')(stranger)\n"
        "from verl_precision.integration.policy_losses import register_losses\n"
        "register_losses(core_algos)\n",
        PYTHONPATH=str(root),
    )
    assert done.returncode != 0
    assert "RegistrationError" in done.stderr
    assert "'grpo' is already registered with verl by __main__.stranger" in done.stderr


def test_registering_twice_changes_nothing():
    from verl.trainer.ppo import core_algos

    from verl_precision.integration.policy_losses import register_losses

    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    register_losses(core_algos)
    assert core_algos.POLICY_LOSS_REGISTRY == before


OWN_LOSS = """
from verl_precision.losses import LossOutput, policy_loss
from verl_precision.losses.aggregation import aggregate

@policy_loss("my_reinforce", "plain REINFORCE", "Williams 1992")
def my_reinforce(trainer_log_probs, advantages, response_mask, *, aggregation):
    return LossOutput(-aggregate(trainer_log_probs * advantages, response_mask, aggregation), {})
"""


def test_own_loss_by_external_module_is_chosen_by_name(run_python, tmp_path, root):
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    done = run_python(
        "import verl\nfrom verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "print(get_policy_loss_fn('my_reinforce').entry.function.__module__, get_policy_loss_fn('gspo').__module__)",
        VERL_USE_EXTERNAL_MODULES="mine",
        PYTHONPATH=f"{tmp_path}:{root}",
    )
    assert done.stdout.split() == ["mine", "verl.trainer.ppo.core_algos"], done.stderr


def test_own_loss_through_verl():
    name = "test_adapter_own"

    @policy_loss(name, "plain REINFORCE", "Williams 1992")
    def own(trainer_log_probs, advantages, response_mask, *, aggregation, scale=2.0):
        return LossOutput(-scale * aggregate(trainer_log_probs * advantages, response_mask, aggregation), {})

    config = actor_config("grpo")
    loss, metrics = call(name, config, log_prob=torch.full((2, 3), -1.0))
    assert loss.item() == pytest.approx(2.0 * 3 / config.loss_scale_factor) and metrics == {}
    policy_loss(name, "plain REINFORCE", "Williams 1992")(own)  # again: nothing happens
    with pytest.raises(RegistrationError, match="one loss per name"):
        policy_loss(name, "another", "-")(lambda trainer_log_probs: None)


def test_own_loss_with_unknown_parameter_is_refused():
    for function in (lambda trainer_log_probs, entropy: None, lambda advantages: None):
        with pytest.raises(RegistrationError, match="Allowed: trainer_log_probs, and any of"):
            policy_loss("test_adapter_bad", "-", "-")(function)
    assert "test_adapter_bad" not in POLICY_LOSSES


def errors(config) -> list[str]:
    return [str(fault) for fault in find_faults(config, Environment()) if fault.severity == "error"]


PG = "actor_rollout_ref.actor.policy_loss.rollout_correction"
IN_THE_WORKER = {
    "bypass off": ("pg_seq_is", ["algorithm.rollout_correction.bypass_mode=False"], "bypass_mode=False: loss_mode"),
    "no marker": ("pg_seq_mis", [f"{PG}.bypass_mode=null"], "bypass_mode=None: loss_mode"),
    "C zero": ("pg_seq_tis", [f"{PG}.rollout_is_threshold=0"], "rollout_is_threshold=0"),
    "C a band": ("pg_seq_mis", [f"{PG}.rollout_is_threshold='0.5_5'"], "rollout_is_threshold='0.5_5'"),
    "C misread by YAML": ("pg_seq_mis", [f"{PG}.rollout_is_threshold=0.55"], "YAML reads that one as 0.55"),
    "constant missing": ("grpo", ["actor_rollout_ref.actor.loss_scale_factor=null"], "loss_scale_factor=None"),
    "constant negative": ("pg_seq_is", ["actor_rollout_ref.actor.loss_scale_factor=-1"], "loss_scale_factor=-1"),
    "constant zero": ("pg_seq_is", ["actor_rollout_ref.actor.loss_scale_factor=0"], "loss_scale_factor=0"),
    "clip range": ("grpo", ["actor_rollout_ref.actor.clip_ratio_low=-0.2"], "actor.clip_ratio_low=-0.2"),
}


@pytest.mark.parametrize("bad", IN_THE_WORKER)
def test_bad_setting_is_refused_by_the_loss_and_before_the_run(bad, composed):
    estimator, overrides, message = IN_THE_WORKER[bad]
    with pytest.raises(ConfigurationError, match=message.replace("'", ".")) as worker:
        call(estimator, actor_config(estimator, *overrides))
    before_the_run = errors(composed(estimator, *overrides))
    assert any(re.search(message.replace("'", "."), text) for text in before_the_run), before_the_run
    for text in (str(worker.value), *before_the_run):
        assert "Allowed: " in text and any(remedy in text for remedy in ("Set ", "Choose ")), text


NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=False"
BEFORE_THE_RUN = {
    "no rollout log-probs": ("pg_seq_is", [NO_LOG_PROBS], "needs the rollout.s log-probs"),
    "weights without rollout log-probs": ("grpo_seq_mis", [NO_LOG_PROBS], "needs the rollout.s log-probs"),
    "V0 trainer": ("pg_seq_is", ["trainer.use_v1=False"], r"trainer\.use_v1=False"),
    "weights in bypass mode": ("grpo_token_tis", ["algorithm.rollout_correction.bypass_mode=True"], "makes no weights"),
    "weights and rejection": ("grpo_seq_mis", ["algorithm.rollout_correction.rollout_rs=token_k1"], "the denominator"),
    "weights normalised": (
        "grpo_seq_mis",
        ["algorithm.rollout_correction.rollout_is_batch_normalize=True"],
        "not those of the equation",
    ),
    "C of the weights": (
        "grpo_token_tis",
        ["algorithm.rollout_correction.rollout_is_threshold=0.55"],
        r"algorithm\.rollout_correction\.rollout_is_threshold=0\.55",
    ),
    "weights for a loss that ignores them": (
        "grpo_seq_mis",
        ["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"],
        "does not apply the weights",
    ),
}


@pytest.mark.parametrize("bad", BEFORE_THE_RUN)
def test_contradiction_is_refused_before_the_run(bad, composed):
    estimator, overrides, message = BEFORE_THE_RUN[bad]
    found = errors(composed(estimator, *overrides))
    assert any(re.search(message, text) for text in found), found


def test_ranks_without_global_counts_are_refused():
    for estimator, missing in (("grpo", "global_batch_size"), ("pg_seq_is", "global_batch_size")):
        with pytest.raises(ConfigurationError, match=f"dp_size=2.*{missing}"):
            call(estimator, actor_config(estimator, dp_size=2))
    with pytest.raises(ConfigurationError, match="dp_size=2.*batch_num_tokens"):
        call("grpo", actor_config("grpo", dp_size=2, global_batch_size=4), loss_agg_mode="token-mean")


def test_weights_for_policy_gradient_are_refused():
    with pytest.raises(ConfigurationError, match=r"rollout_correction\.rollout_is made weights that"):
        call("pg_seq_is", actor_config("pg_seq_is"), rollout_is_weights=torch.ones(2, 3))


def test_no_config_is_refused():
    with pytest.raises(ConfigurationError, match="config=None"):
        call("grpo", None)
