"""Rules of this package's FSDP engine: what its worker would refuse is refused before Ray starts."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import engines, rollout_dtype, short
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule
from verl_precision.engine.settings import require_engine_settings

TARGET = "verl_precision.integration.engine.engine_config.PrecisionFSDPConfig"
ACTOR = "actor_rollout_ref.actor.fsdp_config"
ENGINES = (ACTOR, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


@rule("engine-settings")
def engine_settings(config: DictConfig, environment: Environment) -> Faults:
    """The settings of every engine config that is ours; the shadow belongs to the actor and stands for the rollout."""
    for path in ENGINES:
        block = OmegaConf.select(config, path)
        if block is None or block.get("_target_") != TARGET:
            continue
        try:
            shadow = require_engine_settings(OmegaConf.to_container(block, resolve=True))  # type: ignore[arg-type]
        except ConfigurationError as error:
            error.setting = path + error.setting.removeprefix("fsdp_config")
            yield error
            continue
        if shadow.enabled and path != ACTOR:
            yield Fault(
                setting=f"{path}.shadow." + ("ratio_source" if shadow.ratio_source == "shadow" else "every_n_steps"),
                problem="the shadow is switched on, and only the actor has a ratio",
                allowed="ratio_source=training and every_n_steps=0",
                remedy=f"Set {ACTOR}.shadow instead.",
            )
        elif shadow.enabled and short(shadow.dtype) != rollout_dtype(config):
            yield Fault(
                setting=f"{path}.shadow.dtype",
                problem=f"the rollout runs in {rollout_dtype(config)}, and the shadow stands for the rollout",
                allowed="the rollout's dtype",
                remedy="Leave it out: the presets take it from actor_rollout_ref.rollout.dtype.",
            )


@rule("offload-policy-ignored", "warning")
def offload_policy_ignored(config: DictConfig, environment: Environment) -> Faults:
    """verl reads `offload_policy` under FSDP2 only: under FSDP1 the state stays on the device, without a word."""
    for engine in engines(config):
        if engine.strategy == "fsdp" and engine.trains and engine.node.get("offload_policy"):
            owner = engine.setting.rpartition(".")[0]
            yield Fault(
                setting=f"{engine.setting}.offload_policy",
                problem=f"FSDP1 ignores it, and the state of the {engine.role} stays on the GPU",
                allowed="False, or strategy=fsdp2",
                remedy=f"Set {owner}.strategy=fsdp2, or param_offload and optimizer_offload.",
            )
