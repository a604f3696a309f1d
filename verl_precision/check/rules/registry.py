"""All rules, and the function that asks them."""

import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.extensions import features_asked_for
from verl_precision.check import rules
from verl_precision.check.rules.gpu_memory import OF_GPU
from verl_precision.check.rules.presets import one_for_a_cause, without_chosen
from verl_precision.check.rules.rule import RULES, Environment, Fault, Rule
from verl_precision.check.rules.run import made_by_a_script
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING

# Every module of the folder adds its rules to `RULES` when it is imported.
for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    if _module.name != __name__:
        importlib.import_module(_module.name)

# What cannot work at all comes before what is wrong about it; else the order of names.
FIRST = ("plugin-not-loaded", "verl-refuses", "value-out-of-range", "name-unknown", "model-missing", "not-exact")
ABSENT = ("model-missing", "files-missing")  # a path that is not here is why something is unknown: one cause
# Settings whose rules stand beside the plugin, with the tool that acts on them.
PROMISED = (
    "mismatch.alarm.on_alarm:rescue",
    "actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base",
    *(f"{ARITHMETIC_SETTING}:{arithmetic}" for arithmetic in ("exact", "rounded_once")),
    "weight_sync.rounding:stochastic",
)


def find_faults(config: DictConfig, environment: Environment, this_machine: bool = True) -> list[Fault]:
    """Ask every rule; return the faults: errors, warnings, what could not be looked at.

    The config has Hydra's own node where a precision preset names two dtypes. Unless the run starts on this machine,
    faults of this machine are warnings, but for a model that is not there and that no recipe's script makes. Where the
    run is for another machine (`environment.elsewhere`), they are not faults: that machine could not be looked at.

    Raises:
        ConfigurationError: If the rules of a setting that is in use are not installed beside the plugin.
    """
    features_asked_for("rules", partial(OmegaConf.select, config), PROMISED)  # each adds its rules as it is imported
    ask = partial(_ask, environment=environment, this_machine=this_machine)
    faults = [without_chosen(fault, config) for fault in one_for_a_cause(config, ask(config), ask)]
    return sorted(faults, key=lambda fault: fault.rank)


def _ask(
    config: DictConfig, names: Collection[str] = (), *, environment: Environment, this_machine: bool
) -> list[Fault]:
    """Ask the rules of some names, or all."""
    faults: list[Fault] = []
    for rule in sorted(RULES, key=lambda each: (each.name not in FIRST, each.name)):
        if not names or rule.name in names:
            found = rule.answer(config, environment)
            if rule.of_machine and not this_machine:
                found = [_of_this_machine(fault, rule, config, environment.elsewhere) for fault in found]
            faults += found
    if any(_refuses_the_loss(each) for each in faults):  # whose setting is corrected first
        faults = [each for each in faults if each.name != "loss-unusable"]
    told, absent = environment.unknown, {each.setting for each in faults if each.name in ABSENT}
    if environment.elsewhere and not this_machine:
        unsaid = {each.setting for each in told}
        return [*told, *(each for each in faults if each.name not in ABSENT or each.setting not in unsaid)]
    return [*(each for each in told if each.setting not in absent), *faults]


def _refuses_the_loss(fault: Fault) -> bool:
    places = ("actor_rollout_ref.actor", "algorithm.rollout_correction")
    others = fault.name not in ("loss-unusable", OF_GPU)  # what exceeds a GPU refuses no run
    return fault.severity == "error" and others and fault.setting.startswith(places)


def _of_this_machine(fault: Fault, rule: Rule, config: DictConfig, elsewhere: str) -> Fault:
    """Return a fault of the machine at hand as it counts where a config is only checked there."""
    if elsewhere:
        problem = f"{fault.problem} The run is for another machine ({elsewhere}), so this check did not look at it."
        remedy = f"Check again on that machine. There: {fault.remedy}"
        return replace(fault, severity="unchecked", problem=problem, remedy=remedy)
    if fault.severity != "error" or (rule.name == "model-missing" and not made_by_a_script(config)):
        return fault
    return replace(fault, severity="warning")
