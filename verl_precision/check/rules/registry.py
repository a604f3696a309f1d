"""All rules, and the function that asks them."""

import importlib
import pkgutil
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from verl_precision.check import rules
from verl_precision.check.rules.presets import one_for_a_cause
from verl_precision.check.rules.rule import RULES, SEVERITIES, Environment, Fault
from verl_precision.check.rules.run import made_by_a_script

# Every module of the folder adds its rules to `RULES` when it is imported.
for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    if _module.name != __name__:
        importlib.import_module(_module.name)


def find_faults(config: DictConfig, environment: Environment, this_machine: bool = True) -> list[Fault]:
    """Ask every rule; return the faults: errors, warnings, what could not be looked at.

    The config has Hydra's own node where a precision preset names two dtypes. Unless the run starts on this machine,
    faults of this machine are warnings, but for a model that is not there and that no recipe's script makes: without
    the model's shape half of the rules are silent.
    """
    ask = partial(_ask, environment=environment, this_machine=this_machine)
    faults = one_for_a_cause(config, ask(config), ask)
    return sorted(faults, key=lambda fault: SEVERITIES.index(fault.severity or "error"))


def _ask(config: DictConfig, environment: Environment, this_machine: bool) -> list[Fault]:
    faults: list[Fault] = []
    for rule in RULES:
        found = rule.faults(config, environment)
        warns = rule.of_machine and not this_machine and (rule.name != "model-missing" or made_by_a_script(config))
        faults += [replace(each, severity="warning") if warns and each.severity == "error" else each for each in found]
    return faults
