"""The one composer of configs for all tests; conftest.py offers two of its functions as fixtures.

A composition costs half a second, so each is made once in a process. Every caller gets a copy that it may change.
"""

import copy
import functools
from pathlib import Path

import verl  # noqa: F401 - loads the plugin, and with it search path and resolvers
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

ROOT = Path(__file__).resolve().parents[1]


def compose_verl(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Compose verl's own `ppo_trainer` with overrides; presets come from the plugin's search path."""
    return _copy(_composed(None, overrides), return_hydra_config)


def compose_recipe(path: str | Path, *overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Compose a recipe, named from the repository's root, with overrides."""
    return _copy(_composed(ROOT / path, overrides), return_hydra_config)


def compose_estimator(name: str, *overrides: str) -> DictConfig:
    """Compose verl's own config with an estimator and what verl asks for besides, resolved."""
    batch = ("actor.ppo_micro_batch_size_per_gpu=4", "rollout.log_prob_micro_batch_size_per_gpu=4", "rollout.name=vllm")
    config = compose_verl(*(f"actor_rollout_ref.{setting}" for setting in batch), f"+estimator={name}", *overrides)
    OmegaConf.resolve(config)
    return config


def actor_config(config: DictConfig, **global_batch_info: int):
    """Return verl's typed ActorConfig, as `ppo_loss` hands it to a loss."""
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(loss_scale_factor=actor.loss_scale_factor, **global_batch_info)
    return actor


@functools.cache
def _composed(recipe: Path | None, overrides: tuple[str, ...]) -> DictConfig:
    if recipe is None:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=[*overrides], return_hydra_config=True)
    own = OmegaConf.select(OmegaConf.load(recipe), "hydra.searchpath") or []
    folders = ",".join(["pkg://verl.trainer.config", *own, "pkg://verl_precision.presets"])
    with initialize_config_dir(str(recipe.parent), version_base=None):
        searched = [f"hydra.searchpath=[{folders}]", *overrides]
        return compose(recipe.stem, overrides=searched, return_hydra_config=True)


def _copy(config: DictConfig, with_hydra: bool) -> DictConfig:
    config = copy.deepcopy(config)
    if not with_hydra:
        with open_dict(config):
            del config["hydra"]
    return config
