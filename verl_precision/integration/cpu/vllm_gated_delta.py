"""Gated delta nets of vLLM on a CPU in any dtype: its kernels take BF16 with an FP32 state, and others end its engine.

The same steps in plain torch, one sequence after the other; a prompt and a decoded token take the same recurrence, in
FP32, and the state is kept in its own dtype. BF16 with an FP32 state goes on in vLLM's kernels.
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight
from vllm.utils.torch_utils import _resolve_layer_name

from verl_precision.integration.ledger import wrapping


@wrapping("cpu_gdn_attention_core")
def in_any_dtype(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Write the attention of a step's tokens into `core_attn_out`; without metadata it is a warm-up."""
    mixed_qkv, b, a, core_attn_out, layer_name = args
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    vllms = mixed_qkv.dtype == torch.bfloat16 and [state.dtype for state in layer.kv_cache[1:]] == [torch.float32]
    if vllms or context.attn_metadata is None:
        return wrapped(*args, **kwargs)
    step = context.attn_metadata[layer.prefix]
    assert step.spec_sequence_masks is None, "speculative decoding of gated delta nets on a CPU is vLLM's own in BF16"
    conv_states, states = layer.kv_cache
    conv_states = conv_states if is_conv_state_dim_first() else conv_states.transpose(-1, -2)
    states = states.view(*states.shape[:2], *states.shape[:1:-1])  # as vLLM's kernels for a CPU: [slots, heads, K, V]
    weight = _unpacked_conv_weight(layer).unsqueeze(1)
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float())
    for index, (start, end) in enumerate(pairwise(step.non_spec_query_start_loc.tolist())):
        slot = int(step.non_spec_state_indices_tensor[index])
        begun = index < step.num_decodes or bool(step.has_initial_state[index])
        before, state = conv_states[slot], states[slot].float()
        before, state = (before, state) if begun else (torch.zeros_like(before), torch.zeros_like(state))
        window = torch.cat((before.to(mixed_qkv), mixed_qkv[start:end].T), -1)
        mixed = functional.silu(functional.conv1d(window, weight, groups=len(weight)))
        query, key, value = layer.rearrange_mixed_qkv(mixed.T)
        query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
        output, state = torch_recurrent_gated_delta_rule(
            query, key, value, decay[None, start:end], b[None, start:end].sigmoid(), state[None], True, True
        )
        core_attn_out[start:end] = output[0]
        conv_states[slot], states[slot] = window[:, 1 - weight.shape[-1] :], state[0]
