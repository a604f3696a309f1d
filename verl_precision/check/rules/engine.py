"""Rules of the trainer's FSDP engine: its settings, the shadow, offloading, router replay."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype, short
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule
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


@rule("router-replay")
def router_replay(config: DictConfig, environment: Environment) -> Faults:
    """Replay needs experts, a rollout that says which it chose, packed sequences, and an engine that reads it."""
    actor = engines(config)[0]
    mode = (actor.node.get("router_replay") or {}).get("mode", "disabled")
    watched, sent = bool(actor.node.get("watch_routing")), bool(OmegaConf.select(config, SENT))
    if actor.strategy not in FSDP or (mode == "disabled" and not watched):
        return
    setting = f"{actor.setting}." + ("watch_routing" if mode == "disabled" else "router_replay.mode")

    def fault(problem: str, allowed: str, remedy: str, where: str = setting) -> Fault:
        return Fault(setting=where, problem=problem, allowed=allowed, remedy=remedy)

    if not actor.ours:
        yield fault(
            "verl's own FSDP engine never reads it", "disabled", "Choose a precision preset, whose engine does."
        )
    family = environment.model.get("model_type")
    if family and family not in FAMILIES:
        yield fault(
            f"a model of type {family!r} has no router, or one that was not tested",
            f"a mixture of experts of type {', '.join(FAMILIES)}",
            "Leave out the preset router_replay.",
        )
    if (mode == "R3" or watched) and not sent:
        yield fault("the rollout does not say which experts it has chosen", "True", f"Set {SENT}=True.", SENT)
    if mode == "R2" and OmegaConf.select(config, BYPASS):
        yield fault(
            "in bypass mode there is no old-log-prob pass whose choice could be replayed",
            "False, or R3",
            "Choose router_replay=rollout.",
        )
    if actor.ulysses[1] > 1:
        yield fault("a rank then sees a part of each sequence", "1", f"Set {actor.ulysses[0]}=1.", actor.ulysses[0])
    if not OmegaConf.select(config, PADDING):
        yield fault("choices belong to tokens, and padding has none", "True", f"Set {PADDING}=True.", PADDING)
    shadow = actor.node.get("shadow") or {}
    if shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow":
        where = f"{actor.setting}.shadow"
        problem = "the shadow's forward would choose experts of its own"
        yield fault(problem, "no shadow", f"Set {where}.every_n_steps=0 {where}.ratio_source=training.", where)
