"""The rule of adapters on head or embeddings: FSDP does not wrap them, or one matrix of the rollout is two here."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_precision.base.verl_config import FSDP, engines, lora_is_merged, lora_rank
from verl_precision.check.rules.attention import MODEL
from verl_precision.check.rules.rule import Environment, Fault, rule

# Input embeddings and output head, which one matrix may be.
HEADS = ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "transformer.wte")


@rule("adapter-misplaced")
def adapter_misplaced(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Not every module on which PEFT puts an adapter is wrapped by FSDP and is itself in the rollout.

    FSDP2 makes a class of each module that it wraps, and verl has it wrap head and embeddings that are not tied. Tied
    ones have two names and one matrix in the rollout: merged, an adapter on one of them would be on none or on both.
    """
    model, strategy = config.actor_rollout_ref.model, engines(config)[0].strategy
    loaded = model.get("lora_adapter_path") is not None
    if not (loaded or lora_rank(config)) or strategy not in FSDP or not environment.model:
        return
    adapter, name = (environment.adapter, "lora_adapter_path") if loaded else (model, "target_modules")
    if not (heads := _heads(adapter)):
        return
    setting, tied = f"{MODEL}.{name}", _is_tied({**environment.model, **(model.get("override_config") or {})})
    allowed = "modules of the layers, which are wrapped and sent"
    without = "Train an adapter without it" if loaded else f"Set {setting}=all-linear"
    if not tied if strategy == "fsdp2" else heads != "lm_head":
        problem = f"{heads}: {strategy.upper()} cannot wrap a layer of PEFT's there, and the start fails"
        yield Fault(setting, problem, allowed, f"{without}.")
    if tied and lora_is_merged(config):
        problem = f"{heads} is one matrix with another module (tie_word_embeddings): the rollout has one, you train two"
        yield Fault(setting, problem, allowed, f"{without}, or set {MODEL}.lora.merge=False.")


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
        except re.error:  # no pattern at all: PEFT raises it
            return False
    return any(name == str(target) or name.endswith(f".{target}") for target in targets or ())


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Return whether head and embeddings are one, by `config.json`, or by what its type has where it is silent."""
    if "tie_word_embeddings" in model or "model_type" not in model:
        return bool(model.get("tie_word_embeddings"))
    from transformers import CONFIG_MAPPING

    kind = model["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False))
