"""The rule of adapters that do not arrive: FSDP does not wrap them, or the rollout computes without them."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.verl_config import FSDP, engines, lora_is_merged, lora_rank
from verl_precision.check.rules.dependencies import MODEL, matches_one
from verl_precision.check.rules.rule import Environment, Fault, rule

# Input embeddings and output head, which one matrix may be.
HEADS = ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "transformer.wte")
EXPERTS = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")]
# Model types to whose head and embeddings vLLM gives adapters (0.24 and 0.28: `embedding_modules` of its classes), and
# those to whose experts it gives them as PEFT has them (`is_3d_moe_weight`). It leaves out the others without a word.
SERVED_HEADS = """apertus cwm ernie4_5 exaone4 falcon_h1 glm granite granitemoe granitemoehybrid granitemoeshared
    hyperclovax jais2 jamba lfm2 lfm2_moe llama llama4 llama4_text mellum mixtral nemotron nemotron_h phi3 qwen3
    qwen3_moe""".split()
# Of these PEFT takes `all-linear`, and the names that experts had in transformers 4, for experts.
EXPERTS_AS_LINEAR = """afmoe cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax minimax_m2 olmoe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker solar_open""".split()
SERVED_EXPERTS = ("gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text")
MERGE = f"{MODEL}.lora.merge"


@rule("adapter-misplaced", about="adapters on a head or on experts")
def adapter_misplaced(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Not every module on which PEFT puts an adapter is wrapped by FSDP, sent by verl and served by vLLM.

    FSDP2 makes a class of each module that it wraps, and verl has it wrap head and embeddings that are not tied. Tied
    ones have two names and one matrix in the rollout: merged, an adapter on one of them would be on none or on both.
    vLLM gives an adapter's weights to the modules that it knows, and samples without the others.
    """
    model, strategy = config.actor_rollout_ref.model, engines(config)[0].strategy
    loaded = model.get("lora_adapter_path") is not None
    if not (loaded or lora_rank(config)) or strategy not in FSDP or not environment.model:
        return
    adapter, name = (environment.adapter, "lora_adapter_path") if loaded else (model, "target_modules")
    described: dict[str, Any] = {**environment.model, **(model.get("override_config") or {})}
    setting, kind, heads = f"{MODEL}.{name}", described.get("model_type"), _heads(adapter)
    allowed = "modules of the layers, which are wrapped, sent and served"
    without = "Train an adapter without it" if loaded else f"Set {setting}=all-linear"
    tied, served, merged = bool(heads) and _is_tied(described), kind in SERVED_HEADS, lora_is_merged(config)
    if heads and (not tied if strategy == "fsdp2" else heads != "lm_head"):
        problem = f"{heads}: {strategy.upper()} cannot wrap a layer of PEFT's there, and the start fails"
        yield Fault(setting, problem, allowed, f"{without}.")
    if tied and merged:
        problem = f"{heads} is one matrix with another module (tie_word_embeddings): the rollout has one, you train two"
        yield Fault(setting, problem, allowed, f"{without}, or set {MERGE}=False." if served else f"{without}.")
    if merged or config.actor_rollout_ref.rollout.name != "vllm":
        return
    if heads and not served:
        problem = f"{heads}: vLLM gives a {kind} no adapter there, and samples without it"
        yield Fault(setting, problem, allowed, f"{without}." if tied else f"{without}, or set {MERGE}=True.")
    if kind not in SERVED_EXPERTS and _on_experts(adapter, described):
        problem = (
            "PEFT has one adapter for all experts of a layer, vLLM looks for one an expert, and samples without it"
        )
        yield Fault(setting, problem, allowed, f"Set {MERGE}=True.")


def _heads(adapter: Mapping[str, Any]) -> str:
    """Return the head and the embeddings that an adapter is on, in words. PEFT's `all-linear` leaves the head out."""
    targets, excluded = adapter.get("target_modules"), adapter.get("exclude_modules")
    reached = [name for name in HEADS if _reaches(targets, name) and not _reaches(excluded, name)]
    return " and ".join(name.rpartition(".")[2] for name in reached)


def _reaches(targets: Any, name: str) -> bool:
    """Return whether PEFT finds a module among targets: a pattern for the whole name, or ends of names."""
    if isinstance(targets, str):
        return targets.lower() != "all-linear" and matches_one(targets, [name])
    return any(name == str(target) or name.endswith(f".{target}") for target in targets or ())


def _on_experts(adapter: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Return whether PEFT puts an adapter on experts: by their own names, or by those of transformers 4."""
    if not any(model.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return False
    if parameters := adapter.get("target_parameters"):
        return any("expert" in str(name) or "proj" in str(name) for name in parameters)
    targets = adapter.get("target_modules")
    linear = str(targets).lower() == "all-linear" or any(_reaches(targets, name) for name in EXPERTS)
    return linear and model.get("model_type") in EXPERTS_AS_LINEAR


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Return whether head and embeddings are one, by `config.json`, or by what its type has where it is silent."""
    if "tie_word_embeddings" in model or "model_type" not in model:
        return bool(model.get("tie_word_embeddings"))
    from transformers import CONFIG_MAPPING

    kind = model["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False))
