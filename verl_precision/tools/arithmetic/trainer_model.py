"""A trainer's model computes with operations that are rounded once: `arithmetic=rounded_once` or `exact`.

Attention is registered with transformers' interface. It rotates queries and keys itself, since FSDP2 would cast the
angles to 16 bits on their way into a layer. It separates packed sequences by their positions. Each other operation
replaces the `forward` of its module. A module that is in no table is refused by name: it would round in its own way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from verl.utils.device import get_device_name

from verl_precision.base.dtypes import EXACT
from verl_precision.engine.arithmetic_choice import FAMILIES, arithmetic_in_use, inner_dtype, refused, require_family
from verl_precision.tools.arithmetic import operations
from verl_precision.tools.arithmetic.operations import attention, packed

ATTENTION = "verl_precision"  # name of the attention in transformers


def round_operations_once(engine: Any, module: nn.Module) -> nn.Module:
    """Give an unsharded model operations that are rounded once: a step of an engine's build.

    A GPU rounds its products once in FP32 already, and `exact` is refused there. The rule `not-exact` checks settings.
    """
    inner, on_cpu = inner_dtype(), get_device_name() == "cpu"
    if arithmetic_in_use() == EXACT and not on_cpu:
        raise refused("trainer and rollout would not round the same numbers", "trainer.device=cpu")
    if inner is not None and on_cpu:
        replace_operations(module, inner)
    return module


def replace_operations(module: nn.Module, inner: torch.dtype) -> None:
    """Replace the operations of a transformers model, with or without PEFT's wrapper."""
    config: Any = module.config
    require_family(config)
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # gives a mask of two dimensions, or None
    module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    for name, part in module.named_modules():
        try:
            operation = _operation(part, config.model_type)
        except KeyError:
            kind = f"{type(part).__module__}.{type(part).__name__}"
            problem = f"the model has a module that this arithmetic does not know, {name} ({kind})"
            raise refused(problem, "transformers' modules of its type") from None
        if operation is not None:
            part.forward = partial(operation, part, inner)  # type: ignore[method-assign]


def _mlp(part: Any, inner: torch.dtype, x: Tensor) -> Tensor:
    return part.down_proj(operations.silu_and_mul(part.gate_proj(x), part.up_proj(x), inner=inner))


# A family's modules by the end of their names, and torch's. None: the module only calls others, looks up, or adds.
_OF_FAMILY: dict[str, Callable[..., Any] | None] = {
    "RMSNorm": lambda part, inner, x: operations.rms_norm(x, part.weight, part.variance_epsilon, inner=inner),
    "MLP": _mlp,
    "RotaryEmbedding": lambda part, inner, x, position_ids: (x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)),  # cos and sin
    **dict.fromkeys(("Attention", "DecoderLayer", "Model", "ForCausalLM", "ForTokenClassification")),
}
_OF_TORCH: dict[type, Callable[..., Any] | None] = {
    nn.Linear: lambda part, inner, x: operations.linear(x, part.weight, part.bias, inner=inner),
    **dict.fromkeys((nn.Embedding, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.Dropout, nn.Identity)),
}
_OF_NONE = ("transformers.activations", "peft.")  # modules of the tables call these, or these call them


def _operation(part: nn.Module, model_type: str) -> Callable[..., Any] | None:
    """Return what replaces a module's forward, None to keep it; KeyError if the module is in no table."""
    kind = type(part)
    if kind.__module__.startswith(_OF_NONE):
        return None
    if kind.__module__ == f"transformers.models.{model_type}.modeling_{model_type}":
        return _OF_FAMILY[kind.__name__.removeprefix(FAMILIES[model_type])]
    return _OF_TORCH[kind]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a batch, [B, T, H, D], by transformers' interface, whose operands are [B, H, T, D]."""
    batch, _, tokens, size = query.shape
    if position_ids is None or key.shape[2] != tokens or (attention_mask is not None and attention_mask.dim() != 2):
        raise refused("the model was called with cached keys or a custom mask", "whole sequences, with positions")
    inner = inner_dtype() or torch.float32
    positions = position_ids.expand(batch, -1)
    frequencies = operations.rotary_frequencies(module.config.rope_parameters["rope_theta"], size)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    q, k = (operations.rotary(x, positions.flatten(), frequencies, inner=inner) for x in (q, k))
    found = attention(q, k, v, scaling, packed(positions, attention_mask), inner=inner)
    return found.view(batch, tokens, *found.shape[1:]), None
