"""Compose a recipe as `python -m verl.trainer.main_ppo --config-dir ... --config-name ...` does; ask every trap."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.check import dtype_traps, loss_traps, rollout_traps
from verl_precision.check.dtypes import Row, table
from verl_precision.check.fault import Environment, Fault, Severity
from verl_precision.errors import ConfigurationError

TRAPS = (*dtype_traps.TRAPS, *loss_traps.TRAPS, *rollout_traps.TRAPS)


@dataclass(frozen=True)
class RecipeReport:
    """What a recipe will do.

    Attributes:
        rows: what runs in which dtype.
        faults: every fault, errors first.
    """

    rows: list[Row]
    faults: list[Fault]

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings do not count."""
        return all(fault.severity != "error" for fault in self.faults)

    def as_json(self) -> str:
        """Return it for machines."""
        content: dict[str, Any] = {
            "ok": self.ok,
            "dtypes": [vars(row) for row in self.rows],
            "findings": [{**vars(fault), "value": _plain(fault.value)} for fault in self.faults],
        }
        return json.dumps(content, indent=2)


def find_faults(config: DictConfig, environment: Environment) -> list[Fault]:
    """Ask every trap.

    Args:
        config: the composed config; with Hydra's own node where a precision preset names two dtypes.
        environment: the machine the run is meant for.

    Returns:
        The faults, errors first.
    """
    faults = [fault for trap in TRAPS for fault in trap(config, environment)]
    return sorted(faults, key=lambda fault: fault.severity)


def check_recipe(path: Path, overrides: Sequence[str], environment: Environment) -> RecipeReport:
    """Compose a recipe and ask every trap, and every check of the preflight that is about the config.

    What the preflight would refuse because of this machine (data, memory, Ray) is a warning here: a recipe is often
    checked on another machine than it runs on.

    Args:
        path: the recipe's YAML.
        overrides: Hydra overrides.
        environment: the machine the run is meant for.

    Raises:
        ConfigurationError: if the recipe is missing or does not compose.
    """
    from verl_precision.preflight import CONFIG_CHECKS, failed_checks

    config = compose_recipe(path, overrides)
    faults = find_faults(config, environment)
    for name, error in failed_checks(config):
        severity: Severity = "error" if name in CONFIG_CHECKS else "warning"
        fields = error.setting, error.value, error.problem, error.allowed, error.remedy
        faults.append(Fault(name, severity, *fields))
    return RecipeReport(list(table(config)), sorted(faults, key=lambda fault: fault.severity))


def compose_recipe(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the composed config with Hydra's own node.

    Args:
        path: the recipe's YAML.
        overrides: Hydra overrides.

    Raises:
        ConfigurationError: if the recipe is missing, or does not compose: Hydra's own message.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: no such recipe. Give the YAML itself, e.g. recipes/quickstart/quickstart.yaml."
        )
    import verl  # noqa: F401 - loads the plugin, and with it search path and resolvers
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    own = OmegaConf.select(OmegaConf.load(path), "hydra.searchpath") or []
    folders = ["pkg://verl.trainer.config", *own, "pkg://verl_precision.presets"]
    quoted = ",".join("'" + folder.replace("'", r"\'") + "'" for folder in folders)
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base=None):
            config = compose(
                path.stem, overrides=[f"hydra.searchpath=[{quoted}]", *overrides], return_hydra_config=True
            )
            OmegaConf.resolve(config.actor_rollout_ref)
    except HydraException as error:
        raise ConfigurationError(f"{path} with {list(overrides)}: does not compose. {error}") from error
    return config


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list) or value is None else str(value)
