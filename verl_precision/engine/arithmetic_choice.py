"""The arithmetic of this process, and the models that support it."""

import os
from typing import Any

import torch

from verl_precision.base.errors import ConfigurationError

VARIABLE = "VERL_PRECISION_ARITHMETIC"  # set by the preset, in every process of Ray
ARITHMETIC_SETTING = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"
SETTING = "arithmetic"
# The dtype inside an operation; None: the kernels that torch and vLLM choose.
INNER = {"native": None, "rounded_once": torch.float32, "exact": torch.float64}
# Model types, and how the names of their modules begin in transformers.
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def arithmetic_in_use() -> str:
    """Return the name of the arithmetic that is set for this process."""
    name = os.environ.get(VARIABLE) or "native"
    if name not in INNER:
        problem = f"there is no arithmetic of this name (variable {VARIABLE})"
        raise ConfigurationError(problem, setting=SETTING, value=name, allowed=", ".join(INNER))
    return name


def inner_dtype() -> torch.dtype | None:
    """Return the dtype inside operations; None for the hosts' own kernels."""
    return INNER[arithmetic_in_use()]


def refused(problem: str, allowed: str, remedy: str = "Choose arithmetic=native.") -> ConfigurationError:
    """Return the error for a model or setting with operations that are not rounded once."""
    return ConfigurationError(problem, setting=SETTING, value=arithmetic_in_use(), allowed=allowed, remedy=remedy)


def require_family(config: Any) -> None:
    """Raise an error for a model (its transformers config) with operations that are not rounded once."""
    if config.model_type not in FAMILIES:
        raise refused(f"model type {config.model_type!r} has operations not rounded once", ", ".join(FAMILIES))
    if config.hidden_act != "silu":
        raise refused(f"the model's activation is {config.hidden_act}", "silu")
    if config.attention_dropout:
        raise refused("the model's attention has dropout", "attention_dropout=0")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise refused("the model has layers with a sliding window", "full attention in every layer")
    rope = config.rope_parameters
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refused(f"the model's rotary embedding is {rope}", "rope_type default, over all dimensions")
