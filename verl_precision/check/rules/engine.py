"""Rules of the trainer's FSDP engine: its settings, the shadow, router replay."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype
from verl_precision.check.rules.loss import weighs_responses
from verl_precision.check.rules.rule import Environment, Faults, fault_of_error, rule, told
from verl_precision.engine.router_replay import FAMILIES
from verl_precision.engine.settings import require_engine_settings

TARGET = "verl_precision.integration.engine.engine_config.PrecisionFSDPConfig"
ACTOR = "actor_rollout_ref.actor.fsdp_config"
ENGINES = (ACTOR, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
SENT = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
BYPASS = "algorithm.rollout_correction.bypass_mode"
PADDING = "actor_rollout_ref.model.use_remove_padding"


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
            yield fault_of_error(error)
            continue
        if shadow.enabled and path != ACTOR:
            switch = "ratio_source" if shadow.ratio_source == "shadow" else "every_n_steps"
            yield told("engine-settings shadow elsewhere", path=path, switch=switch)
        elif shadow.enabled and short(shadow.dtype) != rollout_dtype(config):
            yield told("engine-settings shadow dtype", path=path, rollout=rollout_dtype(config))


@rule("engine-settings")
def learning_rate_without_weights(config: DictConfig, environment: Environment) -> Faults:
    """The effective sample size that scales the rate is one of importance weights, which a loss has or is given."""
    setting, loss = f"{ACTOR}.learning_rate_ess_base", config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
    if OmegaConf.select(config, setting) is not None and not weighs_responses(config):
        yield told("engine-settings learning rate", setting=setting, loss=loss)


@rule("router-replay", about="whether the model has experts that replay knows")
def router_replay(config: DictConfig, environment: Environment) -> Faults:
    """Replay needs experts, a rollout that says which it chose, packed sequences, and an engine that reads it."""
    actor = engines(config)[0]
    mode = (actor.node.get("router_replay") or {}).get("mode", "disabled")
    watched, sent = bool(actor.node.get("watch_routing")), bool(OmegaConf.select(config, SENT))
    if actor.strategy not in FSDP or (mode == "disabled" and not watched):
        return
    setting = f"{actor.setting}." + ("watch_routing" if mode == "disabled" else "router_replay.mode")

    if not actor.ours:
        yield told("router-replay engine", setting=setting)
    family = environment.model.get("model_type")
    if family and family not in FAMILIES:
        yield told("router-replay family", setting=setting, family=family, families=", ".join(FAMILIES))
    if (mode == "R3" or watched) and not sent:
        yield told("router-replay sent")
    if mode == "R2" and OmegaConf.select(config, BYPASS):
        yield told("router-replay bypass", setting=setting)
    if actor.ulysses[1] > 1:
        yield told("router-replay ulysses", actor=actor)
    if not OmegaConf.select(config, PADDING):
        yield told("router-replay padding")
    shadow = actor.node.get("shadow") or {}
    if shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow":
        yield told("router-replay shadow", actor=actor)
