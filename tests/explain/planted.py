"""Engines with one fault each, for `explain`: what a process of it builds in place of the right one."""

from typing import Any

import torch

from verl_precision.integration.fsdp_scorer import TrainerEngine
from verl_precision.integration.vllm_sampler import VllmEngine


def _norms(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 100


def _rotary(model: Any) -> None:
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            module.cos_sin_cache = cache.bfloat16().to(cache.dtype)


def vllm_with_another_epsilon(*args: Any, **settings: Any) -> VllmEngine:
    engine = VllmEngine(*args, **settings)
    engine._engine.apply_model(_norms)
    return engine


def vllm_with_bf16_rotary(*args: Any, **settings: Any) -> VllmEngine:
    engine = VllmEngine(*args, **settings)
    engine._engine.apply_model(_rotary)
    return engine


def _softmax_in_16_bits(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attend with BF16 scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).bfloat16()
    if attention_mask is None:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    else:
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = (weights / weights.sum(-1, keepdim=True)).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _across_sequences(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attend to all that comes before, of other sequences too."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def trainer_with_attentions(*args: Any, **settings: Any) -> TrainerEngine:
    """Return a right trainer, to which two wrong kernels are known."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, kernel in (("softmax_in_16_bits", _softmax_in_16_bits), ("across_sequences", _across_sequences)):
        ALL_ATTENTION_FUNCTIONS.register(name, kernel)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return TrainerEngine(*args, **settings)
