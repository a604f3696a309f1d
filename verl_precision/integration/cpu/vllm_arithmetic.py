"""vLLM on a CPU computes with operations that are rounded once: `arithmetic=rounded_once`, `exact` or `integer`.

By vLLM's own means where it has some: operations and experts registered out of tree, an attention backend in the place
of `CPU_ATTN`. Its cache keeps the model's dtype, so that prefix cache, chunked prefill and batches of any size read the
same keys. Linear layers get their kernel from a wrapped dispatch, and log-probs are taken in a wrapped sampler.
"""

from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from verl_precision.base.dtypes import EXACT
from verl_precision.engine.arithmetic import operations
from verl_precision.engine.arithmetic.attention import Request, Spans, attention, plan
from verl_precision.engine.arithmetic.chosen import chosen, inner_dtype, refused, require_family
from verl_precision.integration.ledger import wrap_once


def register_operations(cpu_worker: ModuleType) -> None:
    """Register all operations with vLLM, once, in a process that was asked for them; in any other nothing changes."""
    if inner_dtype() is None or AttentionBackendEnum.CPU_ATTN.is_overridden():
        return
    for stock, ours in _OPERATIONS.items():
        stock.register_oot(ours)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{RoundedAttention.__qualname__}")
    wrap_once("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _linear_layer)
    wrap_once("vllm.v1.sample.sampler", "Sampler.compute_logprobs", _log_probs)
    wrap_once("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_cpu", _sampled)


def _inner() -> torch.dtype:
    return inner_dtype() or torch.float32


def require_supported(config: VllmConfig) -> None:
    """Refuse a model or an option of vLLM with which operations are not all rounded once."""
    model = config.model_config
    require_family(model.hf_text_config)
    if chosen() not in EXACT:
        return
    refusals = {
        "enforce_eager=True: a compiled forward leaves roundings out": (
            config.compilation_config.mode == CompilationMode.NONE
        ),
        "tensor_model_parallel_size=1: partial sums of ranks are rounded": config.parallel_config.world_size == 1,
        "quantization=None": config.quant_config is None,
        "the head in the model's dtype": model.head_dtype == model.dtype,
        "no adapters of vLLM's own": config.lora_config is None,
    }
    for allowed, holds in refusals.items():
        if not holds:
            raise refused("vLLM would compute otherwise than the trainer", allowed)


class RoundedRMSNorm(RMSNorm):
    """Also adds the residual, in the model's dtype: a sum of two numbers has one rounding anyway."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm, and what it was taken of if a residual was added."""
        x = x if residual is None else x + residual
        normed = operations.rms_norm(x, self.weight.data, self.variance_epsilon, inner=_inner())
        return normed if residual is None else (normed, x)

    forward_cpu = forward_native


class RoundedSiluAndMul(SiluAndMul):
    """SwiGLU."""

    def forward_native(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return silu(first half)·second half."""
        return operations.silu_and_mul(*x.chunk(2, dim=-1), inner=_inner())

    forward_cpu = forward_native


class RoundedRotaryEmbedding(RotaryEmbedding):
    """Turns by angles in FP64, of the model's own config."""

    def _rope(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base}

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return queries and keys, turned."""
        frequencies = operations.rotary_frequencies(self._rope(), self.head_size)

        def turned(x: Tensor) -> Tensor:
            heads = x.reshape(len(positions), -1, self.head_size)
            return operations.rotary(heads, positions, frequencies, inner=_inner()).view(x.shape)

        return turned(query), None if key is None else turned(key)

    forward_cpu = forward_native


class RoundedLlama3RotaryEmbedding(RoundedRotaryEmbedding, Llama3RotaryEmbedding):
    """The same with Llama 3's slower turns."""

    def _rope(self) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "rope_theta": self.base,
            "factor": self.scaling_factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.orig_max_position,
        }


class RoundedExperts(CPUUnquantizedExperts):
    """Router and experts; weights stay as they were loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Take over how the layer routes; refuse a way that no family of the table has."""
        if layer.use_grouped_topk or layer.scoring_func != "softmax" or layer.custom_routing_function is not None:
            raise refused("the experts are chosen in a way of the model's own", "the largest of a softmax")
        self.renormalize = layer.renormalize

    def supports_routing_replay_capture(self) -> bool:
        """Return True: the choice is made here."""
        return True

    def apply(self, hidden_states: Tensor, w1: Tensor, w2: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the weighted sum of the chosen experts."""
        number = self.moe_config.experts_per_token
        weights, picked = operations.route(router_logits, number, self.renormalize, inner=_inner())
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(picked.to(torch.int32))
        return operations.experts(hidden_states, picked, weights, w1, w2, inner=_inner())


class RoundedMoE(UnquantizedFusedMoEMethod):
    """vLLM's method with these experts."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.experts_cls = RoundedExperts


_OPERATIONS: dict[Any, type] = {
    RMSNorm: RoundedRMSNorm,
    SiluAndMul: RoundedSiluAndMul,
    RotaryEmbedding: RoundedRotaryEmbedding,
    Llama3RotaryEmbedding: RoundedLlama3RotaryEmbedding,
    UnquantizedFusedMoEMethod: RoundedMoE,
}


class Step(NamedTuple):
    """What the attention of a step reads, the same in all layers."""

    tokens: int
    spans: list[Spans]


class StepBuilder(CPUAttentionMetadataBuilder):
    """Plans a step: which rows of the cache each request's queries see."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the plan; requests have queries one after the other, and keys in the blocks of their table."""
        step, size = common_attn_metadata, self.kv_cache_spec.block_size
        blocks = step.block_table_tensor[:, : -(-step.max_seq_len // size)].long()
        rows = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
        bounds = pairwise(step.query_start_loc[: step.num_reqs + 1].tolist())
        requests = zip(bounds, rows, step.seq_lens[: step.num_reqs].tolist(), strict=False)
        spans = plan(Request(start, end - start, keys[:length]) for (start, end), keys, length in requests)
        return Step(step.num_actual_tokens, spans)


class RoundedAttentionImpl(CPUAttentionBackendImpl):
    """The attention of a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(get_current_vllm_config())
        own = self.sliding_window, self.logits_soft_cap, self.alibi_slopes, self.sinks, self.attn_type
        if own != (-1, 0, None, None, "decoder") or self.kv_cache_dtype != "auto":
            problem = f"the attention is of its own kind: {own}, cache in {self.kv_cache_dtype}"
            raise refused(problem, "causal attention over all tokens, kv_cache_dtype=auto")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values into the rows of their slots; a negative slot is padding's."""
        real = slot_mapping >= 0
        kv_cache.view(-1, *kv_cache.shape[2:])[slot_mapping[real]] = torch.stack((key, value), 1)[: len(real)][real]

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Step | None,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        """Write the attention of a step's tokens into the output, and return it; a warm-up has no plan."""
        if attn_metadata is not None:
            tokens, spans = attn_metadata
            keys, values = kv_cache.view(-1, *kv_cache.shape[2:]).unbind(1)
            found = attention(query[:tokens], keys, values, self.scale, spans, inner=_inner())
            output[:tokens] = found.view(output[:tokens].shape)
        return output


class RoundedAttention(CPUAttentionBackend):
    """Attention over a cache of rows, in the model's dtype: [blocks, tokens of a block, key and value, heads, size]."""

    get_supported_head_sizes: Any = classmethod(lambda cls: [])  # any
    get_impl_cls: Any = staticmethod(lambda: RoundedAttentionImpl)
    get_builder_cls: Any = staticmethod(lambda: StepBuilder)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""
        return num_blocks, block_size, 2, num_kv_heads, head_size


def _linear_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    layer = args[0] if args else kwargs["layer"]
    inner = inner_dtype()
    if inner is not None and layer.weight.ndim == 2 and layer.weight.is_floating_point() and not layer.weight.is_meta:
        # reads the weight itself, which stays as it was loaded
        layer.cpu_linear = partial(operations.linear, inner=inner)
    else:
        wrapped(*args, **kwargs)


def _log_probs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Tensor:
    logits = args[0] if args else kwargs["logits"]
    return operations.log_softmax(logits.float(), inner=_inner())


def _sampled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Sample as vLLM does, and take the log-probs of the logits that it samples from."""
    logits, generators, k, p = args
    logits = apply_top_k_top_p(logits, k, p)
    processed = instance.logprobs_mode == "processed_logprobs"
    log_probs = operations.log_softmax(logits, inner=_inner()) if processed else None
    sampled, others = wrapped(logits, generators, None, None)
    return sampled, log_probs if processed else others
