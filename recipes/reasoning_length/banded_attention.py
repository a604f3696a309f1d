"""Attention with a window, computed in blocks: its cost grows with the length, and not with its square.

torch's attention of a CPU takes a window as a mask, and computes all of the masked products. Here a block of WINDOW
queries sees its own block and the one before: 2 x WINDOW keys for each query, at any length.

It is `attn_implementation: banded` after this module is imported. Products are FP32's, as in vLLM's kernel on a CPU.
"""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

WINDOW = 96  # tokens that a token sees, itself among them


def banded_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, scaling=None, **kwargs):
    """Return softmax(q kᵀ scaling) v over the last `WINDOW` tokens, as transformers' attention functions do.

    Args:
        module: The layer.
        query: [batch, heads, T, size].
        key: [batch, fewer heads, T, size].
        value: As `key`.
        attention_mask: Not read. Padding must follow the tokens, which then never see it.
        scaling: Factor of the products; by default 1/√size.
        **kwargs: The rest of what transformers passes, of which only `sliding_window` is read.

    Returns:
        The output, [batch, T, heads, size], and None in place of the weights.
    """
    if kwargs.get("sliding_window") != WINDOW:
        raise ValueError(
            f"banded attention has a window of {WINDOW} tokens, the model has {kwargs.get('sliding_window')}"
        )
    batch, heads, tokens, size = query.shape
    blocks = -(-tokens // WINDOW)
    padding = (0, 0, 0, blocks * WINDOW - tokens)

    def in_blocks(states: Tensor) -> Tensor:
        return functional.pad(states.float(), padding).unflatten(2, (blocks, WINDOW))

    def with_the_block_before(states: Tensor) -> Tensor:
        own = in_blocks(states)
        return torch.cat([functional.pad(own[:, :, :-1], (0, 0, 0, 0, 1, 0)), own], dim=3)

    row, column = torch.arange(WINDOW)[:, None] + WINDOW, torch.arange(2 * WINDOW)
    seen = (column <= row) & (column > row - WINDOW)
    seen = seen.expand(blocks, -1, -1).clone()
    seen[0, :, :WINDOW] = False  # no block is before the first
    with torch.autocast(query.device.type, enabled=False):
        output = functional.scaled_dot_product_attention(
            *(in_blocks(query).transpose(1, 2).flatten(0, 1), with_the_block_before(key).transpose(1, 2).flatten(0, 1)),
            with_the_block_before(value).transpose(1, 2).flatten(0, 1),
            attn_mask=seen.repeat(batch, 1, 1)[:, None],
            scale=scaling,
            enable_gqa=key.shape[1] != heads,
        )
    output = output.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]
    return output.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("banded", banded_attention)
