"""The faults of `fault_injection.py` and tests/e2e/test_explain.py: in a real engine, or in a model's folder."""

import shutil
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_precision.tools.engines.engine import SamplerSettings, ScorerSettings
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.tiny_model import cached_tiny_model


def _noise(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


# In vLLM: what is done to its model. ---------------------------------------------------------------------------------


def _epsilon(model: Any, size: float) -> None:
    """Multiply the norms' epsilon."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= size


def _rotary(model: Any, size: float) -> None:
    """Keep the rotary cache in BF16."""
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None:
            module.cos_sin_cache = cache.bfloat16().to(cache.dtype)


def _softmax_scale(model: Any, size: float) -> None:
    """Scale attention's scores by 1 + size."""
    for name, module in model.named_modules():
        if name.endswith("attn.attn"):
            module.impl.scale *= 1 + size


def _head(model: Any, size: float) -> None:
    """Have other rows in the output head than the trainer."""

    def hook(module: nn.Module, args: tuple, logits: Tensor | None) -> Tensor | None:
        return None if logits is None else logits * (1 + size * _noise(logits.shape[-1]).to(logits.dtype))

    model.logits_processor.register_forward_hook(hook)


def _where(model: Any, size: float, wanted: Callable[[int, int], bool]) -> None:
    """Change the last hidden state by a factor 1 + size x noise in some forwards: wanted(tokens, sequences)."""
    changed = []

    def before(module: nn.Module, args: tuple) -> None:
        positions = args[0]
        begun = int((positions == 0).sum())  # in decode none begins, and every token is another sequence's
        changed[:] = [wanted(len(positions), begun or len(positions))]

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        if not changed[0]:
            return output
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        hidden = hidden * (1 + size * _noise(hidden.shape[-1]).to(hidden.dtype))
        return (hidden, *rest) if rest else hidden

    model.model.layers[0].self_attn.rotary_emb.register_forward_pre_hook(before)
    model.model.norm.register_forward_hook(after)


def _decode(model: Any, size: float) -> None:
    """Have another kernel in decode than in prefill."""
    _where(model, size, lambda tokens, sequences: tokens == sequences)


def _batch(model: Any, size: float) -> None:
    """Depend on whether there are other sequences in the batch."""
    _where(model, size, lambda tokens, sequences: sequences > 1)


IN_VLLM = {
    "epsilon": _epsilon, "rotary": _rotary, "softmax_scale": _softmax_scale,
    "head": _head, "decode": _decode, "batch": _batch,
}  # fmt: skip


def faulty_vllm(settings: SamplerSettings, faults: dict[str, float]) -> VllmEngine:
    """Return a right engine with faults of `IN_VLLM`, each with its size."""
    engine = VllmEngine(settings)
    for name, size in faults.items():
        engine._engine.apply_model(partial(IN_VLLM[name], size=size))
    return engine


# In the trainer: kernels of attention, and its model. ----------------------------------------------------------------


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


def faulty_trainer(settings: ScorerSettings, epsilon: float = 1.0) -> TrainerEngine:
    """Return a right trainer, to which two wrong kernels are known; its norms' epsilon may be another."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, kernel in (("softmax_in_16_bits", _softmax_in_16_bits), ("across_sequences", _across_sequences)):
        ALL_ATTENTION_FUNCTIONS.register(name, kernel)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    engine = TrainerEngine(settings)
    _epsilon(engine._engine.module, epsilon)
    return engine


# In a model's folder. ------------------------------------------------------------------------------------------------


def _in_folder(change: Callable[[dict[str, Tensor], float], None]) -> Callable[[str, Path, float], str]:
    """Turn what changes a model's tensors into what writes a changed copy of a model to a new folder."""

    @wraps(change)
    def write(model: str, folder: Path, size: float) -> str:
        source = cached_tiny_model(model.removeprefix("tiny:")) if model.startswith("tiny:") else Path(model)
        shutil.copytree(source, folder)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors, size)
        save_file(tensors, file, {"format": "pt"})
        return str(folder)

    return write


@_in_folder
def stale_head(tensors: dict[str, Tensor], size: float) -> None:
    """The output head alone is another: relative change `size`."""
    head = tensors["lm_head.weight"]
    head *= 1 + size * _noise(head.numel()).view_as(head)


@_in_folder
def version_behind(tensors: dict[str, Tensor], size: float) -> None:
    """One step of Adam with learning rate `size` lies between the two."""
    for tensor in tensors.values():
        tensor += size * _noise(tensor.numel()).view_as(tensor).sign()


@_in_folder
def near_tie(tensors: dict[str, Tensor], size: float) -> None:
    """Three experts of a mixture have scores `size` apart, relatively, of which two are chosen."""
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            for expert in range(len(tensor)):
                tensor[expert] = tensor[expert - expert % 3] * (1 + size * (expert % 3))
