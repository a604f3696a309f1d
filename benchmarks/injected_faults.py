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


# In vLLM's model. ----------------------------------------------------------------------------------------------------


def _epsilon(model: Any, size: float) -> None:
    """Multiply the epsilon of the norms by `size`."""
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
    """Change the rows of the output head from the trainer's."""

    def hook(module: nn.Module, args: tuple, logits: Tensor | None) -> Tensor | None:
        return None if logits is None else logits * (1 + size * _noise(logits.shape[-1]).to(logits.dtype))

    model.logits_processor.register_forward_hook(hook)


def _where(model: Any, size: float, wanted: Callable[[int, int], bool]) -> None:
    """Multiply the last hidden state by 1 + size x noise in the forwards for which wanted(tokens, sequences) holds."""
    changed = []

    def before(module: nn.Module, args: tuple) -> None:
        positions = args[0]
        begun = int((positions == 0).sum())  # in decode no sequence begins, and each has one token
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
    """Compute decode differently from prefill."""
    _where(model, size, lambda tokens, sequences: tokens == sequences)


def _batch(model: Any, size: float) -> None:
    """Compute a sequence differently if the batch has other sequences."""
    _where(model, size, lambda tokens, sequences: sequences > 1)


IN_VLLM = {
    "epsilon": _epsilon, "rotary": _rotary, "softmax_scale": _softmax_scale,
    "head": _head, "decode": _decode, "batch": _batch,
}  # fmt: skip


def faulty_vllm(settings: SamplerSettings, faults: dict[str, float]) -> VllmEngine:
    """Return a vLLM engine with faults of `IN_VLLM`, each with its size."""
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
    """Attend to all earlier tokens, also to those of other sequences."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def faulty_trainer(settings: ScorerSettings, epsilon: float = 1.0) -> TrainerEngine:
    """Return a trainer that can use two wrong kernels, with the epsilon of its norms times `epsilon`."""
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
    """Return a function that writes a copy of a model, changed by `change`, to a new folder."""

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
    """Change only the output head, by `size` relatively."""
    head = tensors["lm_head.weight"]
    head *= 1 + size * _noise(head.numel()).view_as(head)


@_in_folder
def version_behind(tensors: dict[str, Tensor], size: float) -> None:
    """Change all weights by one step of Adam with learning rate `size`."""
    for tensor in tensors.values():
        tensor += size * _noise(tensor.numel()).view_as(tensor).sign()


@_in_folder
def near_tie(tensors: dict[str, Tensor], size: float) -> None:
    """Give groups of three experts router scores that differ by `size` relatively; two experts are chosen."""
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            for expert in range(len(tensor)):
                tensor[expert] = tensor[expert - expert % 3] * (1 + size * (expert % 3))
