"""Rules of adapters that do not arrive: FSDP does not wrap them, or the rollout computes without them."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.verl_config import FSDP, engines, lora_is_merged, lora_rank
from verl_precision.check.rules.dependencies import MODEL, matches_one
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule

# Input embeddings and output head, which one matrix may be.
HEADS = ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "transformer.wte")
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


@rule("adapter-on-tied-head", about="adapters on a head or on experts")
def adapter_on_tied_head(config: DictConfig, environment: Environment) -> Faults:
    """One matrix has two names in the rollout: merged, an adapter on one of them would be on none or on both."""
    for setting, settings, described in _adapted(config, environment):
        heads, kind = _reached(settings), described.get("model_type")
        if heads and _is_tied(described) and lora_is_merged(config):
            problem = (
                f"{heads} is one matrix with another module (tie_word_embeddings): the rollout has that matrix alone"
            )
            instead = f"{MODEL}.lora.merge=False" if kind in SERVED_HEADS else ""
            yield _fault(setting, f"{problem}, and cannot be sent the two that are trained", instead)


@rule("adapter-not-served", about="adapters on a head or on experts")
def adapter_not_served(config: DictConfig, environment: Environment) -> Faults:
    """vLLM gives an adapter's weights to the modules that it knows, and samples without the others."""
    for setting, settings, described in _adapted(config, environment):
        heads, kind = _reached(settings), described.get("model_type")
        if config.actor_rollout_ref.rollout.name != "vllm" or lora_is_merged(config):
            continue
        if heads and kind not in SERVED_HEADS:
            instead = "" if _is_tied(described) else f"{MODEL}.lora.merge=True"
            yield _fault(setting, f"{heads}: vLLM gives a {kind} no adapter there, and samples without it", instead)
        if kind not in SERVED_EXPERTS and _reaches_experts(settings, described):
            problem = (
                "PEFT has one adapter for all experts of a layer, vLLM looks for one an expert, and samples without it"
            )
            yield _fault(setting, problem, f"{MODEL}.lora.merge=True")


@rule("adapter-not-wrapped", about="adapters on a head or on experts")
def adapter_not_wrapped(config: DictConfig, environment: Environment) -> Faults:
    """FSDP2 makes a class of each module that it wraps, and verl has it wrap head and embeddings that are not tied."""
    for setting, settings, described in _adapted(config, environment):
        heads, strategy = _reached(settings), engines(config)[0].strategy
        if heads and (not _is_tied(described) if strategy == "fsdp2" else heads != "lm_head"):
            yield _fault(
                setting, f"{heads}: {strategy.upper()} cannot wrap a layer of PEFT's there, and the start fails"
            )


def _adapted(config: DictConfig, environment: Environment) -> Iterator[tuple[str, Mapping[str, Any], dict[str, Any]]]:
    """Yield the setting of an FSDP actor's adapter, what it says of modules, and what is known of the model."""
    model = config.actor_rollout_ref.model
    loaded = model.get("lora_adapter_path") is not None
    if (loaded or lora_rank(config)) and engines(config)[0].strategy in FSDP and environment.model:
        described = {**environment.model, **(model.get("override_config") or {})}
        yield (
            f"{MODEL}.lora_adapter_path" if loaded else f"{MODEL}.target_modules",
            environment.adapter if loaded else model,
            described,
        )


def _fault(setting: str, problem: str, instead: str = "") -> Fault:
    remedy = "Train an adapter without it" if setting.endswith("_path") else f"Set {setting}=all-linear"
    if "experts" in problem and instead:
        remedy, instead = f"Set {instead}", ""
    allowed = "modules of the layers, which are wrapped, sent and served"
    remedy = f"{remedy}{f', or {instead}' if instead else ''}."
    return Fault(setting=setting, problem=problem, allowed=allowed, remedy=remedy)


def _reached(settings: Mapping[str, Any]) -> str:
    """Return the head and the embeddings that an adapter is on, in words. PEFT's `all-linear` leaves the head out."""
    targets, excluded = settings.get("target_modules"), settings.get("exclude_modules")
    reached = [name for name in HEADS if _reaches(targets, name) and not _reaches(excluded, name)]
    return " and ".join(name.rpartition(".")[2] for name in reached)


def _reaches(targets: Any, name: str) -> bool:
    """Return whether PEFT finds a module among targets: a pattern for the whole name, or ends of names."""
    if isinstance(targets, str):
        return targets.lower() != "all-linear" and matches_one(targets, [name])
    return any(name == str(target) or name.endswith(f".{target}") for target in targets or ())


def _reaches_experts(settings: Mapping[str, Any], described: Mapping[str, Any]) -> bool:
    """Return whether PEFT puts an adapter on experts: by their own names, or by those of transformers 4."""
    if any(described.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        targets = settings.get("target_modules")
        known = described.get("model_type") in EXPERTS_AS_LINEAR
        names = [
            f"model.layers.0.mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
        ]
        if settings.get("target_parameters"):
            return any("expert" in str(name) or "proj" in str(name) for name in settings["target_parameters"])
        return known and (str(targets).lower() == "all-linear" or any(_reaches(targets, name) for name in names))
    return False


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Return whether head and embeddings are one, by `config.json`, or by what its type has where it is silent."""
    if "tie_word_embeddings" in model or "model_type" not in model:
        return bool(model.get("tie_word_embeddings"))
    from transformers import CONFIG_MAPPING

    kind = model["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False))
