"""Rules of the trainer's engines: attention, packing, dropout, adapters on heads; our settings, shadow, router replay.

The last rule is about rollouts other than vLLM.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT, short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import (
    FSDP,
    MODEL,
    PROMPT_LOG_PROBS,
    ROLLOUT,
    engines,
    leaves,
    lora_is_merged,
    lora_rank,
    rollout_dtype,
)
from verl_precision.check.rules.rule import Environment, Fault, fault_of_error, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.engine.router_replay import FAMILIES
from verl_precision.engine.settings import require_engine_settings

ATTENTION = f"{MODEL}.override_config.attn_implementation"
VERLS_ATTENTION = "flash_attention_2"  # verl's default
PADDING = f"{MODEL}.use_remove_padding"
# verl.models.transformers.monkey_patch gives these a forward that knows where packed sequences end. It needs the
# kernels of flash-linear-attention: transformers' own delta rule in torch takes `cu_seqlens` and does not read it.
PACKED_BY_VERL = ("qwen3_5", "qwen3_5_moe")
# Input embeddings and output head; they may share one matrix.
HEADS = ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "transformer.wte")
OF_HEADS = ("classifier", "summary", "token_dropout")  # dropouts of classifiers, and of protein models' inputs
TARGET = "verl_precision.integration.engine.engine_config.PrecisionFSDPConfig"
ACTOR = "actor_rollout_ref.actor.fsdp_config"
ENGINES = (ACTOR, "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
SENT = f"{ROLLOUT}.enable_rollout_routing_replay"
CANARY = "weight_sync.canary.every_n_syncs"


@rule("attention-refuses-fp32")
def attention_refuses_fp32(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """flash-attn computes in 16 bits only: the first forward in FP32 raises, minutes in."""
    if config.trainer.device != "cuda":
        return
    full = list(_in_fp32(config))
    shared, attention = " and ".join(role for role in full if role != "critic"), attention_of(config)
    if shared and "flash" in attention:  # transformers looks for this in the name, too
        yield Fault.worded("attention-refuses-fp32", ATTENTION, value=attention, shared=shared)
    if "critic" in full:
        yield Fault.worded("attention-refuses-fp32/critic", "critic.fsdp.mixed_precision.param_dtype")


@rule("ulysses-needs-flash")
def ulysses_needs_flash(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Ulysses exchanges parts of a sequence for heads, which verl does in flash attention only."""
    attention = attention_of(config)
    if "flash" in attention:
        return
    full = list(_in_fp32(config))
    for engine in engines(config):
        setting, size = engine.ulysses
        if size > 1 and engine.strategy in FSDP and engine.role != "critic":  # verl loads it with flash attention
            bits = "32 bits" if engine.role in full else "16 bits"
            yield Fault.worded(f"ulysses-needs-flash/{bits}", setting, attention=attention)


@rule("packed-delta-nets")
def packed_delta_nets(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """transformers' gated delta nets do not get the ends of packed sequences: the state continues into the next one."""
    packed = config.actor_rollout_ref.model.use_remove_padding and config.actor_rollout_ref.actor.strategy in FSDP
    if not packed or not gated_delta_nets(environment.model):
        return
    if (kind := environment.model.get("model_type")) not in PACKED_BY_VERL:
        yield Fault.worded("packed-delta-nets", PADDING, kind=kind, separated=" or ".join(PACKED_BY_VERL))


def gated_delta_nets(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's `config.json` that describes its gated delta nets; empty if it has none."""
    text = model.get("text_config") or model
    return text if "linear_num_value_heads" in text else {}


def attention_of(config: DictConfig) -> str:
    """Return the attention of actor and reference. verl passes null on, and transformers then takes sdpa."""
    overrides = config.actor_rollout_ref.model.get("override_config") or {}
    return str(overrides.get("attn_implementation", VERLS_ATTENTION) or "sdpa")


def _in_fp32(config: DictConfig) -> Iterator[str]:
    """Yield each forward of verl's FSDP that computes in FP32: actor, actor's shadow, ref, critic."""
    for engine in engines(config):
        if engine.strategy not in FSDP:
            continue
        if engine.compute == "fp32":
            yield engine.role
        shadow = OmegaConf.select(engine.node, "shadow") or {}
        on = shadow.get("ratio_source") == "shadow" or shadow.get("every_n_steps", 0)
        if engine.role == "actor" and on and short(shadow.get("dtype")) == "fp32":
            yield "actor's shadow"


@rule("dropout-in-update", "warning")
def dropout_in_update(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The trainer's forward drops elements where the rollout's does not: the ratio is not 1 before any update."""
    if OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT:  # there the rule not-exact reports it
        return
    for setting, key, rate in _rates(config, environment):
        whose = "loaded adapter" if setting.endswith("_path") else "config"
        yield Fault.worded(f"dropout-in-update/{whose}", setting, value=rate, rate=rate, key=key)


def _rates(config: DictConfig, environment: Environment) -> Iterator[tuple[str, str, float]]:
    """Yield setting, name and rate of each dropout that is above 0 in the trainer's model."""
    model = config.actor_rollout_ref.model
    over: Any = OmegaConf.to_container(model.get("override_config") or DictConfig({}))
    for key, rate in _positive({**environment.model, **over}):
        yield f"{MODEL}.override_config.{key}", key, rate
    if model.get("lora_adapter_path"):
        yield from ((f"{MODEL}.lora_adapter_path", key, rate) for key, rate in _positive(environment.adapter))
    elif lora_rank(config) and engines(config)[0].strategy not in FSDP:  # verl's FSDP engines do not read it
        yield from ((f"{MODEL}.lora.{key}", key, rate) for key, rate in _positive(model.get("lora") or {}))


def _positive(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in leaves(content):
        key = name.rpartition(".")[2]
        if "drop" in key and not key.startswith(OF_HEADS) and type(value) in (int, float) and value > 0:
            yield name, float(value)


@rule("adapter-misplaced")
def adapter_misplaced(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """An adapter on head or embeddings may be one that FSDP cannot wrap, or that the rollout cannot get.

    FSDP2 makes a class of each module that it wraps, and verl lets it wrap head and embeddings that are not tied. Tied
    ones share one matrix in the rollout: an adapter that is merged into one of them would change none or both.
    """
    model, strategy = config.actor_rollout_ref.model, engines(config)[0].strategy
    loaded = model.get("lora_adapter_path") is not None
    if not (loaded or lora_rank(config)) or strategy not in FSDP or not environment.model:
        return
    adapter, name = (environment.adapter, "lora_adapter_path") if loaded else (model, "target_modules")
    if not (heads := _heads(adapter)):
        return
    setting, tied = f"{MODEL}.{name}", _is_tied({**environment.model, **(model.get("override_config") or {})})
    without = "Train an adapter without it" if loaded else f"Set {setting}=all-linear"
    if not tied if strategy == "fsdp2" else heads != "lm_head":
        wrapper = strategy.upper()
        yield Fault.worded("adapter-misplaced/not wrapped", setting, heads=heads, wrapper=wrapper, without=without)
    if tied and lora_is_merged(config):
        yield Fault.worded("adapter-misplaced/tied", setting, heads=heads, without=without)


def _heads(adapter: Mapping[str, Any]) -> str:
    """Return the head and the embeddings that an adapter is on, in words. PEFT's `all-linear` leaves the head out."""
    targets, excluded = adapter.get("target_modules"), adapter.get("exclude_modules")
    reached = [name for name in HEADS if _reaches(targets, name) and not _reaches(excluded, name)]
    return " and ".join(name.rpartition(".")[2] for name in reached)


def _reaches(targets: Any, name: str) -> bool:
    """Return whether PEFT finds a module among targets: a pattern for the whole name, or ends of names."""
    if isinstance(targets, str):
        try:
            return targets.lower() != "all-linear" and re.fullmatch(targets, name) is not None
        except re.error:  # not a pattern: PEFT raises this error
            return False
    return any(name == str(target) or name.endswith(f".{target}") for target in targets or ())


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Return whether head and embeddings are one, by `config.json`, or by its model type's default."""
    if "tie_word_embeddings" in model or "model_type" not in model:
        return bool(model.get("tie_word_embeddings"))
    from transformers import CONFIG_MAPPING

    kind = model["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False))


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
            yield Fault.worded("engine-settings/shadow not of the actor", f"{path}.shadow.{switch}")
        elif shadow.enabled and short(shadow.dtype) != dtype:
            yield Fault.worded("engine-settings/dtype of the shadow", f"{path}.shadow.dtype", dtype=dtype)


@rule("router-replay")
def router_replay(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Replay needs experts, a rollout that reports its choice, packed sequences, and an engine that reads it."""
    actor = engines(config)[0]
    mode = (actor.node.get("router_replay") or {}).get("mode", "disabled")
    watched, sent = bool(actor.node.get("watch_routing")), bool(OmegaConf.select(config, SENT))
    if actor.strategy not in FSDP or (mode == "disabled" and not watched):
        return
    setting = f"{actor.setting}." + ("watch_routing" if mode == "disabled" else "router_replay.mode")
    family, (ulysses, ranks) = environment.model.get("model_type"), actor.ulysses
    shadow = actor.node.get("shadow") or {}
    if not actor.ours:
        yield Fault.worded("router-replay/engine", setting)
    if family and family not in FAMILIES:
        yield Fault.worded("router-replay/model", setting, family=family, families=", ".join(FAMILIES))
    if (mode == "R3" or watched) and not sent:
        yield Fault(SENT, "the rollout does not report its choice of experts", "True")
    if mode == "R2" and OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        yield Fault.worded("router-replay/bypass mode", setting)
    if ranks > 1:
        yield Fault(ulysses, "each rank then has only a part of each sequence", "1")
    if not OmegaConf.select(config, PADDING):
        yield Fault(PADDING, "the replay assigns choices to tokens; it does not support padding", "True")
    if shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow":
        yield Fault.worded("router-replay/shadow", f"{actor.setting}.shadow")


@rule("rollout-unverified", "warning")
def rollout_unverified(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Only vLLM's workers compare the bits that arrived; and TensorRT-LLM's server cannot answer a canary."""
    name = str(config.actor_rollout_ref.rollout.name)
    if name == "vllm" or OmegaConf.select(config, "mismatch.enabled") is not True:
        return
    yield Fault.worded("rollout-unverified", f"{ROLLOUT}.name")
    if OmegaConf.select(config, CANARY) and name not in PROMPT_LOG_PROBS:
        yield Fault.worded("rollout-unverified/canary", CANARY, name=name)
