"""vLLM on a CPU computes with operations that are rounded once: `arithmetic=rounded_once` or `exact`.

This uses vLLM's own interfaces where they exist: operations registered out of tree, an attention backend in place of
`CPU_ATTN`. The KV cache has the model's dtype, so that prefix cache, chunked prefill and batches of any size read the
same keys. Two functions are wrapped: the one that gives linear layers their kernel, and the sampler with its log-probs.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from verl_precision.base.dtypes import EXACT
from verl_precision.engine.arithmetic_choice import arithmetic_in_use, inner_dtype, refused, require_family
from verl_precision.engine.log_probs import log_softmax
from verl_precision.integration.ledger import wrap_once
from verl_precision.tools.arithmetic import operations
from verl_precision.tools.arithmetic.operations import AttentionSpan, SpansTogether, attention, plan


def register_operations() -> None:
    """Register all operations with vLLM, once."""
    if AttentionBackendEnum.CPU_ATTN.is_overridden():
        return
    RMSNorm.register_oot(_RMSNorm)
    SiluAndMul.register_oot(_SiluAndMul)
    RotaryEmbedding.register_oot(_RotaryEmbedding)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{_Attention.__qualname__}")
    wrap_once("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _linear_layer)
    wrap_once("vllm.v1.sample.sampler", "Sampler.compute_logprobs", _log_probs)
    wrap_once("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_cpu", _sampled)


def require_supported(config: VllmConfig) -> None:
    """Refuse a model or an option of vLLM with which operations are not all rounded once."""
    model = config.model_config
    require_family(model.hf_text_config)
    if arithmetic_in_use() == EXACT:
        mode = config.compilation_config.mode
        needed = {
            "enforce_eager=True: a compiled forward pass skips roundings": mode == CompilationMode.NONE,
            "tensor_model_parallel_size=1: partial sums of ranks are rounded": config.parallel_config.world_size == 1,
            "quantization=None": config.quant_config is None,
            "an output head in the model's dtype": model.head_dtype == model.dtype,
            "no LoRA adapters in vLLM": config.lora_config is None,
        }
        for allowed, holds in needed.items():
            if not holds:
                raise refused("vLLM would not use the trainer's operations", allowed)


def _inner() -> torch.dtype:
    return inner_dtype() or torch.float32


class _RMSNorm(RMSNorm):
    """Also adds the residual, in the model's dtype: the sum of two numbers is rounded once anyway."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        normed = operations.rms_norm(x, self.weight.data, self.variance_epsilon, inner=_inner())
        return normed if residual is None else (normed, x)

    forward_cpu = forward_native


class _SiluAndMul(SiluAndMul):
    def forward_native(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return operations.silu_and_mul(*x.chunk(2, dim=-1), inner=_inner())

    forward_cpu = forward_native


class _RotaryEmbedding(RotaryEmbedding):
    """Rotates by FP64 angles, computed from the model's own config."""

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Any]:
        frequencies = operations.rotary_frequencies(self.base, self.head_size)

        def turned(x: Tensor) -> Tensor:
            heads = x.reshape(len(positions), -1, self.head_size)
            return operations.rotary(heads, positions, frequencies, inner=_inner()).view(x.shape)

        return turned(query), None if key is None else turned(key)

    forward_cpu = forward_native


class Step(NamedTuple):
    """The plan of attention in a step, the same for all layers."""

    tokens: int
    spans: list[SpansTogether]


class _StepBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """Plans a step: the queries of the requests are consecutive, their keys lie in the blocks of their tables."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        step, size = common_attn_metadata, self.kv_cache_spec.block_size
        blocks = step.block_table_tensor[:, : -(-step.max_seq_len // size)].long()
        rows = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
        bounds = pairwise(step.query_start_loc[: step.num_reqs + 1].tolist())
        requests = zip(bounds, rows, step.seq_lens[: step.num_reqs].tolist(), strict=False)
        spans = plan(AttentionSpan(start, end - start, keys[:length]) for (start, end), keys, length in requests)
        return Step(step.num_actual_tokens, spans)


def _rows(kv_cache: Tensor) -> Tensor:
    """Return a layer's cache by its slots, [slots, key and value, heads, size]: another view of the same memory.

    vLLM allocates it as [blocks, heads, tokens of a block, 2 x size], for the kernel that is replaced here.
    """
    blocks, heads, tokens, both = kv_cache.shape
    return kv_cache.view(blocks * tokens, 2, heads, both // 2)


class _AttentionImpl(cpu_attn.CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(get_current_vllm_config())
        own = self.sliding_window, self.logits_soft_cap, self.alibi_slopes, self.sinks, self.attn_type
        if own != (-1, 0, None, None, "decoder") or self.kv_cache_dtype != "auto":
            problem = f"this kind of attention cannot be replaced: {own}, cache in {self.kv_cache_dtype}"
            raise refused(problem, "causal attention over all tokens, kv_cache_dtype=auto")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        real = slot_mapping >= 0  # padding has negative slots
        _rows(kv_cache)[slot_mapping[real]] = torch.stack((key, value), 1)[: len(real)][real]

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Step | None,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is not None:  # a warm-up has no plan
            tokens, spans = attn_metadata
            keys, values = _rows(kv_cache).unbind(1)
            found = attention(query[:tokens], keys, values, self.scale, spans, inner=_inner())
            output[:tokens] = found.view(output[:tokens].shape)
        return output


class _Attention(cpu_attn.CPUAttentionBackend):
    """Attention over a cache in the model's dtype, of vLLM's own size (`_rows`)."""

    get_supported_head_sizes: Any = classmethod(lambda cls: [])  # any size
    get_impl_cls: Any = staticmethod(lambda: _AttentionImpl)
    get_builder_cls: Any = staticmethod(lambda: _StepBuilder)


def _linear_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    layer = args[0] if args else kwargs["layer"]
    inner = inner_dtype()
    if inner is not None and layer.weight.ndim == 2 and layer.weight.is_floating_point() and not layer.weight.is_meta:
        # This kernel reads the weight as it was loaded.
        layer.cpu_linear = partial(operations.linear, inner=inner)
    else:
        wrapped(*args, **kwargs)


def _log_probs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Tensor:
    return log_softmax((args[0] if args else kwargs["logits"]).float(), inner=_inner())


def _sampled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Sample as vLLM does, and compute the log-probs from the logits that vLLM samples from."""
    logits, generators, k, p = args
    logits = apply_top_k_top_p(logits, k, p)
    processed = instance.logprobs_mode == "processed_logprobs"
    log_probs = log_softmax(logits, inner=_inner()) if processed else None
    sampled, others = wrapped(logits, generators, None, None)
    return sampled, log_probs if processed else others
