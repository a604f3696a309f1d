"""Build the engine configs in the driver, so that a setting that cannot work ends the run before Ray starts."""

from omegaconf import DictConfig

from verl_precision.errors import ConfigurationError, VerlPrecisionError

TARGET = "verl_precision.engine.config.PrecisionFSDPConfig"
ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


def check_engines(config: DictConfig) -> None:
    """Build each engine config that is ours, as verl's workers will.

    Args:
        config: the composed config.

    Raises:
        ConfigurationError: of the first one refused, with the path of its block.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    for path in ENGINES:
        block = OmegaConf.select(config, path)
        if block is None or block.get("_target_") != TARGET:
            continue
        try:
            typed = instantiate(block, _convert_="partial")
        except InstantiationException as error:
            cause = error.__cause__
            if not isinstance(cause, VerlPrecisionError):
                raise
            raise ConfigurationError(f"{path}: {cause}") from error
        if typed.shadow.enabled:
            _check_shadow(config, path, typed.shadow.dtype)


def _check_shadow(config: DictConfig, path: str, dtype: str) -> None:
    from verl_precision.check.dtypes import rollout_dtype, short

    if path != ENGINES[0]:
        raise ConfigurationError(
            f"{path}.shadow is switched on: only the actor has a ratio. Allowed: ratio_source=training and "
            f"every_n_steps=0. Set {ENGINES[0]}.shadow instead."
        )
    if short(dtype) != rollout_dtype(config):
        raise ConfigurationError(
            f"{path}.shadow.dtype={dtype!r}, but the rollout runs in {rollout_dtype(config)}: the shadow stands for "
            "the rollout. Allowed: the rollout's dtype. Leave it out: the presets take it from "
            "actor_rollout_ref.rollout.dtype."
        )
