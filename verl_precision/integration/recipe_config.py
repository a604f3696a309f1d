"""Compose a recipe as `python -m verl.trainer.main_ppo --config-dir ... --config-name ...` does; ask every rule."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import ConfigurationError
from verl_precision.integration.machine import look
from verl_precision.rules.book import find_faults
from verl_precision.rules.dtypes import engines, rollout_dtype, transport_dtype
from verl_precision.rules.rule import Environment, Fault


@dataclass(frozen=True)
class Row:
    """One line of the table: what runs in which dtype, and the setting that decides."""

    what: str
    dtype: str
    source: str


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


def check_recipe(path: Path, overrides: Sequence[str], environment: Environment) -> RecipeReport:
    """Compose a recipe as verl would, and ask every rule.

    What is wrong with this machine (data, memory) is an error in a run and a warning here: a recipe is often checked on
    another machine than it runs on.

    Args:
        path: Recipe's YAML.
        overrides: Hydra overrides.
        environment: vLLM and GPUs of the machine that the run is meant for.

    Raises:
        ConfigurationError: if the recipe is missing or does not compose.
    """
    config = compose_recipe(path, overrides)
    return RecipeReport(list(table(config)), find_faults(config, look(config, environment), elsewhere=True))


def table(config: DictConfig) -> Iterator[Row]:
    """Yield what will run in which dtype.

    Args:
        config: the composed config.
    """
    for engine in engines(config):
        yield Row(f"{engine.role} forward", engine.compute, engine.source)
        if engine.trains:
            yield Row(f"{engine.role} master weights, Adam", engine.master, f"{engine.setting}.model_dtype")
            yield Row(
                f"{engine.role} gradient reduction", engine.reduce, f"{engine.setting}.mixed_precision.reduce_dtype"
            )
        else:
            yield Row(f"{engine.role} weights", engine.master, f"{engine.setting}.model_dtype")
    yield Row("rollout", rollout_dtype(config), "actor_rollout_ref.rollout.dtype")
    yield Row("weights to the rollout", *transport_dtype(config))
    yield Row(
        "rollout log-probs",
        "fp32",
        "vLLM takes them in FP32" if config.actor_rollout_ref.rollout.name == "vllm" else "",
    )
    actor = engines(config)[0]
    on_cpu = config.trainer.device == "cpu" and not actor.ours
    yield Row(
        "trainer log-probs",
        actor.compute if on_cpu else "fp32",
        "log-softmax in the logits' dtype (device cpu)" if on_cpu else "autocast and flash-attn lift them to FP32",
    )


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
            f"{path}: no such recipe", remedy="Give the YAML itself, e.g. recipes/quickstart/quickstart.yaml."
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
