"""All rules, and the function that asks them."""

from dataclasses import replace

from omegaconf import DictConfig

from verl_precision.rules import (  # noqa: F401
    attention_rules,
    checkpoint_rules,
    dtype_rules,
    engine_rules,
    file_rules,
    layout_rules,
    loss_rules,
    memory_rules,
    repeatable_rules,
    rollout_rules,
    router_rules,
    run_rules,
    sampling_mask_rules,
    value_rules,
)
from verl_precision.rules.rule import RULES, Environment, Fault


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
