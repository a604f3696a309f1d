"""Rules of the trainer's attention: kinds without FP32, sinks or Ulysses, not installed, or that cannot be packed."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.verl_config import FSDP, engines
from verl_precision.check.rules.rule import Environment, Faults, Machine, rule, told

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
VERLS_ATTENTION = "flash_attention_2"  # verl's default
WITH_SINKS, WITHOUT_SINKS = ("gpt_oss",), ("sdpa", VERLS_ATTENTION)  # models, and kinds of attention
# verl.models.transformers.monkey_patch gives these a forward that knows where packed sequences end. It needs the
# kernels of flash-linear-attention: transformers' own delta rule in torch takes `cu_seqlens` and does not read it.
PACKED_BY_VERL = ("qwen3_5", "qwen3_5_moe")
# vLLM's classes for text stand beside those for images, which import torchvision.
WITH_TORCHVISION = (*PACKED_BY_VERL, "qwen3_5_text", "qwen3_5_moe_text")
NEEDED_BY_MODEL = {"flash-linear-attention": PACKED_BY_VERL, "torchvision": WITH_TORCHVISION}


@rule("attention-refuses-fp32")
def attention_refuses_fp32(config: DictConfig, environment: Environment) -> Faults:
    """flash-attn computes in 16 bits only: the first forward in FP32 raises, minutes in."""
    if config.trainer.device != "cuda":
        return
    full = list(_in_fp32(config))
    if shared := " and ".join(role for role in full if role != "critic"):
        if _is_flash(attention := attention_of(config)):
            yield told("attention-refuses-fp32", value=attention, shared=shared)
    if "critic" in full:
        yield told("attention-refuses-fp32 critic")


@rule("attention-not-installed", of_machine=True)
def attention_not_installed(config: DictConfig, machine: Machine) -> Faults:
    """transformers refuses a model with flash attention where flash-attn is missing, in a worker, after Ray's start."""
    attention = attention_of(config)
    if config.trainer.device != "cuda" or config.actor_rollout_ref.actor.strategy not in FSDP:
        return
    if attention == VERLS_ATTENTION and not machine.flash_attention:
        yield told("attention-not-installed", value=attention)


@rule("ulysses-needs-flash")
def ulysses_needs_flash(config: DictConfig, environment: Environment) -> Faults:
    """Ulysses exchanges parts of a sequence for heads, which verl does in flash attention only."""
    attention = attention_of(config)
    if _is_flash(attention):
        return
    full = list(_in_fp32(config))
    for engine in engines(config):
        setting, size = engine.ulysses
        if size > 1 and engine.strategy in FSDP and engine.role != "critic":  # verl loads it with flash attention
            case = " in FP32" if engine.role in full else ""
            yield told(f"ulysses-needs-flash{case}", setting=setting, attention=attention)


@rule("attention-without-sinks", about="attention sinks")
def attention_without_sinks(config: DictConfig, environment: Environment) -> Faults:
    """transformers refuses gpt-oss with an attention that has no sinks, in a worker, after Ray's start."""
    attention = attention_of(config)
    engine = config.actor_rollout_ref.actor.strategy in FSDP
    if engine and attention in WITHOUT_SINKS and environment.model.get("model_type") in WITH_SINKS:
        yield told("attention-without-sinks", value=attention)


@rule("gpt-oss-on-cpu", about="whether it runs on a CPU")
def gpt_oss_on_cpu(config: DictConfig, environment: Environment) -> Faults:
    """vLLM's class copies experts and sinks into parameters itself, which on a CPU are on the meta device by then."""
    if config.trainer.device == "cpu" and environment.model.get("model_type") in WITH_SINKS:
        yield told("gpt-oss-on-cpu")


@rule("torchvision-missing", of_machine=True, about="packages of the model's classes")
def torchvision_missing(config: DictConfig, machine: Machine) -> Faults:
    """vLLM cannot import its class for Qwen3.5 without torchvision."""
    if config.actor_rollout_ref.rollout.name == "vllm" and "torchvision" in machine.missing_for_model:
        yield told("torchvision-missing")


@rule("packed-delta-nets", about="packed sequences in delta nets")
def packed_delta_nets(config: DictConfig, environment: Environment) -> Faults:
    """Nobody tells transformers' gated delta nets where a packed sequence ends: its state goes on in the next one."""
    if not _is_packed(config) or not gated_delta_nets(environment.model):
        return
    if (kind := environment.model.get("model_type")) not in PACKED_BY_VERL:
        yield told("packed-delta-nets", kind=kind, known=" or ".join(PACKED_BY_VERL))


@rule("packed-delta-nets", of_machine=True, about="packages of the model's classes")
def packed_delta_nets_in_torch(config: DictConfig, machine: Machine) -> Faults:
    """verl says where it ends, and without flash-linear-attention nobody listens."""
    if _is_packed(config) and "flash-linear-attention" in machine.missing_for_model:
        yield told("packed-delta-nets torch")


def _is_packed(config: DictConfig) -> bool:
    return bool(config.actor_rollout_ref.model.use_remove_padding) and config.actor_rollout_ref.actor.strategy in FSDP


def gated_delta_nets(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's `config.json` that describes its gated delta nets; empty if it has none."""
    text = model.get("text_config") or model
    return text if "linear_num_value_heads" in text else {}


def attention_of(config: DictConfig) -> str:
    """Return the attention of actor and reference. verl hands null on, and transformers then takes sdpa."""
    overrides = config.actor_rollout_ref.model.get("override_config") or {}
    return str(overrides.get("attn_implementation", VERLS_ATTENTION) or "sdpa")


def _is_flash(attention: str) -> bool:
    """Return whether it is flash attention, which transformers tells by the name too."""
    return "flash" in attention


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
