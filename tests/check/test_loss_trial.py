"""The loss in force is called as verl calls it: verl's losses, ours, and somebody's own, which may do what it likes."""

import os
import re
import sys
import time
from functools import wraps

import pytest
from composer import compose_estimator, compose_verl
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss

from verl_precision.check import loss_trial
from verl_precision.check.loss_trial import tried_loss
from verl_precision.check.rules.rule import TriedLoss
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.presets import preset_names

VERLS = [name for name, loss in POLICY_LOSS_REGISTRY.items() if getattr(loss, "__module__", "").startswith("verl.")]
OURS = [*(name for name in preset_names("estimator") if f"vp_{name}" in POLICY_LOSSES), "icepop"]
VARIANTS = {
    "bypass_mode, rollout_is_batch_normalize": "loss_mode=bypass_mode +policy_loss.rollout_correction="
    "{loss_type:reinforce,rollout_is:token,rollout_is_threshold:2.0,rollout_is_batch_normalize:True}",
}
NEEDED = {"dro": "policy_loss.dro_beta=0.1"}


def config_of(name: str, *actor: str, **settings: str):
    words = [f"policy_loss.{word}" if word.startswith("loss_mode") else word for word in VARIANTS.get(name, "").split()]
    words = [*(words or [f"policy_loss.loss_mode={name}"]), *NEEDED.get(name, "").split(), *actor]
    words = [re.sub(r"^(\+?)", r"\1actor_rollout_ref.actor.", word) for word in words]
    words.append("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4")
    config = compose_verl(*words, "actor_rollout_ref.rollout.name=vllm")
    for setting, value in settings.items():
        OmegaConf.update(config, setting.replace("__", "."), value)
    return config


def shown(name: str, tried: TriedLoss) -> str:
    """Return a loss's row of the table in docs/math.md."""
    trial = tried.trial
    sizes = [*trial.cuts.values(), trial.ranks, trial.padding]
    cells = [f"{size:.2g}" if size > 1e-3 else "0" for size in sizes]
    return f"| `{name}` | {' | '.join(cells)} | {'yes' if trial.random else 'no'} |"


def test_the_table_of_the_page_has_what_is_computed(root):
    page = (root / "docs" / "math.md").read_text()
    rows = [shown(name, tried_loss(config_of(name))) for name in (*VERLS, *VARIANTS)]
    assert [row for row in rows if row not in page] == []
    stated = re.findall(r"^\| `([^`]+)` \| [\d.]+ \| [\d.]+ \|.*\| (?:yes|no) \|$", page, re.M)
    assert stated == [*VERLS, *VARIANTS]


@pytest.mark.parametrize("estimator", OURS)
def test_none_of_ours_depends_on_the_cut(estimator):
    tried = tried_loss(compose_estimator(estimator))
    assert max(*tried.trial.cuts.values(), tried.trial.ranks, tried.trial.padding, tried.trial.masked) < 1e-12
    assert tried.problem == tried.unusable == tried.trial.nonfinite == "" and not tried.ignores_weights


@pytest.mark.parametrize("name", ["gspo", "kl_cov", "geo_mean"])
@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum-norm"])
def test_no_aggregation_makes_a_difference(name, mode):
    """Nor does the `norm` mode without its constant, which `normalizer-missing` is about."""
    tried = tried_loss(config_of(name, f"loss_agg_mode={mode}"))
    assert (tried.trial.cuts[8] > 1e-3) == (name != "gspo") and tried.trial.padding == 0


def test_no_policy_loss_is_in_force_beside_distillation_alone():
    config = config_of("geo_mean")
    OmegaConf.update(config, "distillation.enabled", True)
    OmegaConf.update(config, "distillation.distillation_loss.use_task_rewards", False)
    assert tried_loss(config) is None


# Somebody's own losses: (log-probs, old ones, advantages, mask, mode, config, weights) -> what verl would be given.


def ratio(new, old, advantages):
    return -advantages * (new - old).exp()


def sound(new, old, advantages, mask, mode, config, weights):
    objective = ratio(new, old, advantages)
    objective = objective if weights is None else objective * weights
    return agg_loss(objective, mask, mode, **config.global_batch_info), {}


def local_mean(new, old, advantages, mask, mode, config, weights):
    return (ratio(new, old, advantages) * mask).sum() / mask.sum(), {}


def without_weights(*given):
    return sound(*given[:-1], None)


def raising(*given):
    raise RuntimeError("no\nGPU")


OWN = {
    "sound": (sound, {}),
    "local_mean": (local_mean, {"cut": True}),
    "raising": (raising, {"problem": "it raises RuntimeError: no GPU"}),
    "printing": (lambda *given: print("printed") or os.system("echo said") or sound(*given), {}),
    "without_end": (lambda *given: time.sleep(600), {"problem": "it has not returned in 5 seconds"}),
    "ending": (lambda *given: os._exit(7), {"problem": "its process ended with exit code 7"}),
    "exiting": (lambda *given: sys.exit(5), {"problem": "its process ended with exit code 5"}),
    "a tensor": (lambda *given: sound(*given)[0], {"unusable": "it returns Tensor"}),
    "a number and metrics": (lambda *given: (1.0, {}), {"unusable": "it returns (float, dict)"}),
    "nan": (lambda new, *others: (new.sum() * float("nan"), {}), {"nonfinite": "the whole batch"}),
    "zero": (lambda *given: (given[0].sum() * 0, {}), {"unusable": "its gradient is 0 everywhere"}),
    "no scalar": (lambda *given: (given[0], {}), {"unusable": "it returns a tensor of shape (8, 16)"}),
    "no gradient": (lambda *given: (given[1].sum(), {}), {"unusable": "it returns a tensor without a gradient"}),
}


def as_verls(function):
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        given = log_prob, old_log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        return function(*given)

    return loss


@pytest.mark.parametrize("name", OWN)
def test_somebodys_own_loss(name, monkeypatch, capfd):
    own, expected = OWN[name]
    monkeypatch.setattr(loss_trial, "SECONDS", 5 if name == "without_end" else 120)  # others are waited for
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", as_verls(own))
    tried = tried_loss(config_of("own"))
    for field in ("problem", "unusable"):
        said = getattr(tried, field)
        assert said.startswith(expected.get(field, "")) and bool(said) == (field in expected)
    assert (tried.trial is None) == bool(tried.problem or tried.unusable)
    if tried.trial is not None:
        assert tried.trial.nonfinite == expected.get("nonfinite", "")
        assert (min(tried.trial.cuts.values()) > 0.9) == ("cut" in expected)
    assert tried.problem or tried.owner.startswith(f"{__name__}.as_verls")
    assert capfd.readouterr() == ("", "")


def test_who_wrote_a_loss_is_not_who_it_names(monkeypatch):
    """`functools.wraps` around one of verl's is somebody's own."""

    @wraps(core_algos.compute_policy_loss_vanilla)
    def wrapped(**given):
        return core_algos.compute_policy_loss_vanilla(**given)

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", wrapped)
    tried = tried_loss(config_of("own"))
    assert tried.owner.startswith(f"{__name__}.") and tried.trial.cuts == dict.fromkeys((2, 4, 8), 0)


def test_a_loss_without_verls_keywords_is_unusable(monkeypatch):
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", lambda old_log_prob, log_prob, **others: (log_prob.sum(), {}))
    assert tried_loss(config_of("own")).trial is not None
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", lambda old_log_prob, log_prob: (log_prob.sum(), {}))
    unusable = tried_loss(config_of("own")).unusable
    assert unusable.startswith("it cannot be called with old_log_prob, log_prob, advantages")


@pytest.mark.parametrize(("own", "ignores"), [(sound, False), (without_weights, True), (local_mean, True)])
def test_importance_weights_are_applied_or_not(own, ignores, monkeypatch):
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", as_verls(own))
    assert tried_loss(config_of("own", algorithm__rollout_correction__rollout_is="token")).ignores_weights == ignores
    assert not tried_loss(config_of("own")).ignores_weights


def test_external_lib_is_imported_there_and_not_here(tmp_path, monkeypatch):
    (tmp_path / "lib_with_a_loss.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss\n"
        "@register_policy_loss('from_lib')\n"
        "def mean(log_prob, advantages, **others):\n    return (log_prob * advantages).mean(), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    lib = {"actor_rollout_ref__model__external_lib": "lib_with_a_loss"}
    tried = tried_loss(config_of("from_lib", **lib))
    assert tried.owner == "lib_with_a_loss.mean" and tried.trial.cuts[8] > 1
    assert "from_lib" not in POLICY_LOSS_REGISTRY and "lib_with_a_loss" not in sys.modules
    assert "no loss of this name" in tried_loss(config_of("other", **lib)).problem
