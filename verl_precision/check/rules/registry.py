"""All rules, and the function that asks them."""

import importlib
import pkgutil
from dataclasses import replace

from omegaconf import DictConfig

from verl_precision.check import rules
from verl_precision.check.rules.rule import RULES, Environment, Fault

# Every module of the folder adds its rules to `RULES` when it is imported.
for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    if _module.name != __name__:
        importlib.import_module(_module.name)


def find_faults(config: DictConfig, environment: Environment, elsewhere: bool = False) -> list[Fault]:
    """Ask every rule.

    Args:
        config: Composed config; with Hydra's own node where a precision preset names two dtypes.
        environment: What is known beyond it.
        elsewhere: Whether the run may start on another machine: faults of the machine at hand are then warnings.

    Returns:
        The faults, errors first.
    """
    faults: list[Fault] = []
    for rule in RULES:
        found = rule.faults(config, environment)
        faults += [replace(fault, severity="warning") for fault in found] if elsewhere and rule.of_machine else found
    return sorted(faults, key=lambda fault: fault.severity)
