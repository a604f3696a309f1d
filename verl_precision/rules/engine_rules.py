"""Rules of this package's FSDP engine: what its worker would refuse is refused before Ray starts."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.engine.settings import ShadowSettings, require_engine_settings
from verl_precision.errors import ConfigurationError
from verl_precision.rules.dtypes import rollout_dtype, short
from verl_precision.rules.rule import Case, Environment, refused, rule

TARGET = "verl_precision.integration.engine_config.PrecisionFSDPConfig"
ACTOR = "actor_rollout_ref.actor.fsdp_config"
ENGINES = (ACTOR, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


@rule("check_engines")
def engine_settings(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The settings of every engine config that is ours."""
    for path, block in _own_engines(config):
        for error in refused(require_engine_settings, block):
            error.setting = path + error.setting.removeprefix("fsdp_config")
            yield error


@rule(
    "check_engines",
    setting="{path}.shadow.{key}",
    problem="the shadow is switched on, and only the actor has a ratio.",
    allowed="ratio_source=training and every_n_steps=0",
    remedy=f"Set {ACTOR}.shadow instead.",
)
def shadow_without_ratio(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """Reference and critic have no ratio."""
    for path, shadow in _shadows(config):
        if path != ACTOR:
            yield {"path": path, "key": "ratio_source" if shadow.ratio_source == "shadow" else "every_n_steps"}


@rule(
    "check_engines",
    setting=f"{ACTOR}.shadow.dtype",
    problem="the rollout runs in {rollout}, and the shadow stands for the rollout.",
    allowed="the rollout's dtype",
    remedy="Leave it out: the presets take it from actor_rollout_ref.rollout.dtype.",
)
def shadow_in_another_dtype(config: DictConfig, environment: Environment) -> Iterator[Case]:
    """The shadow stands for the rollout."""
    for path, shadow in _shadows(config):
        if path == ACTOR and short(shadow.dtype) != rollout_dtype(config):
            yield {"rollout": rollout_dtype(config)}


def _own_engines(config: DictConfig) -> Iterator[tuple[str, dict]]:
    for path in ENGINES:
        block = OmegaConf.select(config, path)
        if block is not None and block.get("_target_") == TARGET:
            yield path, OmegaConf.to_container(block, resolve=True)  # type: ignore[misc]


def _shadows(config: DictConfig) -> Iterator[tuple[str, ShadowSettings]]:
    """Yield the shadows that are switched on, of engines that are right otherwise."""
    for path, block in _own_engines(config):
        try:
            shadow = require_engine_settings(block)
        except ConfigurationError:  # said by engine_settings
            continue
        if shadow.enabled:
            yield path, shadow
