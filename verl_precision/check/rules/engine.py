"""Rules of the trainer's FSDP engine: its settings, the shadow, router replay."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule
from verl_precision.engine.router_replay import FAMILIES
from verl_precision.engine.settings import require_engine_settings
from verl_precision.losses.registry import POLICY_LOSSES

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
            switch = "ratio_source" if shadow.ratio_source == "shadow" else "every_n_steps"
            problem = "the shadow is switched on, and only the actor has a ratio"
            allowed, remedy = "ratio_source=training and every_n_steps=0", f"Set {ACTOR}.shadow instead."
            yield Fault(setting=f"{path}.shadow.{switch}", problem=problem, allowed=allowed, remedy=remedy)
        elif shadow.enabled and short(shadow.dtype) != rollout_dtype(config):
            problem = f"the rollout runs in {rollout_dtype(config)}, and the shadow stands for the rollout"
            remedy = "Leave it out: the presets take it from actor_rollout_ref.rollout.dtype."
            yield Fault(setting=f"{path}.shadow.dtype", problem=problem, allowed="the rollout's dtype", remedy=remedy)


@rule("engine-settings")
def learning_rate_without_weights(config: DictConfig, environment: Environment) -> Faults:
    """The effective sample size that scales the rate is one of importance weights, which a loss has or is given."""
    setting, loss = f"{ACTOR}.learning_rate_ess_base", config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
    ours = POLICY_LOSSES.get(loss or "vanilla")
    needs = frozenset() if ours is None else ours.parameters
    weighted = "rollout_is_weights" in needs and OmegaConf.select(config, "algorithm.rollout_correction.rollout_is")
    if OmegaConf.select(config, setting) is not None and not weighted and "rollout_log_probs" not in needs:
        problem = f"loss_mode={loss} has no importance weights here, and so no effective sample size"
        remedy = "Choose estimator=pg_seq_is, or leave out the preset learning_rate."
        yield Fault(setting=setting, problem=problem, allowed="null, or a loss with weights", remedy=remedy)


@rule("router-replay")
def router_replay(config: DictConfig, environment: Environment) -> Faults:
    """Replay needs experts, a rollout that says which it chose, packed sequences, and an engine that reads it."""
    actor = engines(config)[0]
    mode = (actor.node.get("router_replay") or {}).get("mode", "disabled")
    watched, sent = bool(actor.node.get("watch_routing")), bool(OmegaConf.select(config, SENT))
    if actor.strategy not in FSDP or (mode == "disabled" and not watched):
        return
    setting = f"{actor.setting}." + ("watch_routing" if mode == "disabled" else "router_replay.mode")

    if not actor.ours:
        problem, remedy = "verl's own FSDP engine never reads it", "Choose a precision preset, whose engine does."
        yield Fault(setting=setting, problem=problem, allowed="disabled", remedy=remedy)
    family = environment.model.get("model_type")
    if family and family not in FAMILIES:
        problem = f"a model of type {family!r} has no router, or one that was not tested"
        allowed, remedy = f"a mixture of experts of type {', '.join(FAMILIES)}", "Leave out the preset router_replay."
        yield Fault(setting=setting, problem=problem, allowed=allowed, remedy=remedy)
    if (mode == "R3" or watched) and not sent:
        yield Fault(setting=SENT, problem="the rollout does not say which experts it has chosen", allowed="True")
    if mode == "R2" and OmegaConf.select(config, BYPASS):
        problem = "in bypass mode there is no old-log-prob pass whose choice could be replayed"
        remedy = "Choose router_replay=rollout."
        yield Fault(setting=setting, problem=problem, allowed="False, or R3", remedy=remedy)
    if actor.ulysses[1] > 1:
        yield Fault(setting=actor.ulysses[0], problem="a rank then sees a part of each sequence", allowed="1")
    if not OmegaConf.select(config, PADDING):
        yield Fault(setting=PADDING, problem="choices belong to tokens, and padding has none", allowed="True")
    shadow = actor.node.get("shadow") or {}
    if shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow":
        where, problem = f"{actor.setting}.shadow", "the shadow's forward would choose experts of its own"
        remedy = f"Set {where}.every_n_steps=0 {where}.ratio_source=training."
        yield Fault(setting=where, problem=problem, allowed="no shadow", remedy=remedy)
