"""Rules of engines: of ours the settings, shadow and router replay; what does not hold with others, or without vLLM."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, PROMPT_LOG_PROBS, ROLLOUT, engines, rollout_dtype
from verl_precision.check.rules.attention import PADDING
from verl_precision.check.rules.rule import Environment, Fault, fault_of_error, rule
from verl_precision.engine.router_replay import FAMILIES
from verl_precision.engine.settings import require_engine_settings

TARGET = "verl_precision.integration.engine.engine_config.PrecisionFSDPConfig"
ACTOR = "actor_rollout_ref.actor.fsdp_config"
ENGINES = (ACTOR, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
SENT = f"{ROLLOUT}.enable_rollout_routing_replay"
CANARY = "weight_sync.canary.every_n_syncs"


@rule("engine-settings")
def engine_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The settings of every engine config that is ours; the shadow belongs to the actor and stands for the rollout."""
    for path in ENGINES:
        block, dtype = OmegaConf.select(config, path), rollout_dtype(config)
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
            problem, allowed = "only the actor has a shadow", "ratio_source=training and every_n_steps=0"
            yield Fault(f"{path}.shadow.{switch}", problem, allowed, f"Set {ACTOR}.shadow instead.")
        elif shadow.enabled and short(shadow.dtype) != dtype:
            problem, allowed = f"the shadow must have the rollout's dtype, which is {dtype}", "the rollout's dtype"
            remedy = f"Leave it out: the presets take it from {ROLLOUT}.dtype."
            yield Fault(f"{path}.shadow.dtype", problem, allowed, remedy)


@rule("router-replay")
def router_replay(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Replay needs experts, a rollout that says which it chose, packed sequences, and an engine that reads it."""
    actor = engines(config)[0]
    mode = (actor.node.get("router_replay") or {}).get("mode", "disabled")
    watched, sent = bool(actor.node.get("watch_routing")), bool(OmegaConf.select(config, SENT))
    if actor.strategy not in FSDP or (mode == "disabled" and not watched):
        return
    setting = f"{actor.setting}." + ("watch_routing" if mode == "disabled" else "router_replay.mode")
    family, (ulysses, ranks) = environment.model.get("model_type"), actor.ulysses
    shadow = actor.node.get("shadow") or {}
    if not actor.ours:
        remedy = "Choose a precision preset; its engine reads it."
        yield Fault(setting, "verl's own FSDP engine does not read it", "disabled", remedy)
    if family and family not in FAMILIES:
        problem = f"a model of type {family!r} has no router, or its router was not tested"
        allowed = f"a mixture of experts of type {', '.join(FAMILIES)}"
        yield Fault(setting, problem, allowed, "Leave out the preset router_replay.")
    if (mode == "R3" or watched) and not sent:
        yield Fault(SENT, "the rollout does not report its choice of experts", "True")
    if mode == "R2" and OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        problem = "bypass mode has no old-log-prob pass, so there is no choice of experts to replay"
        yield Fault(setting, problem, "False, or R3", "Choose router_replay=rollout.")
    if ranks > 1:
        yield Fault(ulysses, "each rank then has only a part of each sequence", "1")
    if not OmegaConf.select(config, PADDING):
        yield Fault(PADDING, "the replay assigns choices to tokens; it does not support padding", "True")
    if shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow":
        remedy = f"Set {actor.setting}.shadow.every_n_steps=0 {actor.setting}.shadow.ratio_source=training."
        yield Fault(f"{actor.setting}.shadow", "its forward pass would choose other experts", "no shadow", remedy)


@rule("rollout-unverified", "warning")
def rollout_unverified(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Only vLLM's workers compare the bits that arrived; and TensorRT-LLM's server cannot answer a canary."""
    name = str(config.actor_rollout_ref.rollout.name)
    if name == "vllm" or OmegaConf.select(config, "mismatch.enabled") is not True:
        return
    problem = "only vLLM's workers can verify the tensors and layers of a weight sync"
    remedy = "Do nothing, or use vllm; docs/architecture.md says what works with other engines."
    yield Fault(f"{ROLLOUT}.name", problem, "vllm", remedy)
    if OmegaConf.select(config, CANARY) and name not in PROMPT_LOG_PROBS:
        problem = f"as verl drives it, a {name} server returns no log-probs of a prompt, or whole responses with them"
        yield Fault(CANARY, f"{problem}: no sync is verified", "0")
