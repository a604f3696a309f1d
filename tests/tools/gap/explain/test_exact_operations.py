"""A recorded operation is compared bit for bit with the formula in FP64, rounded once; the first other one is named."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from verl_precision.base.tiny_model import cached_tiny_model
from verl_precision.tools.gap.explain.exact_operations import first_unequal

TOKENS, AT = 9, "model.layers.1."


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request):
    loaded = AutoModelForCausalLM.from_pretrained(cached_tiny_model(request.param), dtype=torch.bfloat16)
    return loaded.float().eval()


def calls_of(model):
    """Write each operation of a layer as vLLM records it: inputs at random, outputs by plain FP64."""
    generator = torch.Generator().manual_seed(0)
    block = model.model.layers[1]
    own, mlp = block.self_attn, block.mlp
    size, kv = own.q_proj.out_features, own.k_proj.out_features

    def draw(width):
        return torch.randn(TOKENS, width, generator=generator).bfloat16().double()

    def product(x, *modules):
        bias = [0 if module.bias is None else module.bias.double() for module in modules]
        return torch.cat([x @ m.weight.double().T + b for m, b in zip(modules, bias, strict=True)], -1)

    def heads(x):
        return x.view(1, TOKENS, -1, own.head_dim).transpose(1, 2)

    def turned(x):
        rope, half = model.config.rope_parameters, own.head_dim // 2
        angles = torch.arange(TOKENS)[:, None] / rope["rope_theta"] ** (torch.arange(half).double() / half)
        one, other = heads(x).chunk(2, -1)
        both = one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()
        return torch.cat(both, -1)[0].transpose(0, 1).flatten(1)

    x, residual, q, k, v = (draw(width) for width in (block.input_layernorm.weight.numel(),) * 2 + (size, kv, kv))
    total = (x + residual).bfloat16().double()
    norm = block.input_layernorm
    normed = total * (total.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()
    attended = scaled_dot_product_attention(*map(heads, (q, k, v)), is_causal=True, scale=own.scaling, enable_gqa=True)
    yield "input_layernorm", (x, residual), (normed, total)
    yield "self_attn.qkv_proj", (x,), (product(x, own.q_proj, own.k_proj, own.v_proj),)
    yield "self_attn.attn", (q, k, v), (attended[0].transpose(0, 1).flatten(1),)
    yield "self_attn.o_proj", (q,), (product(q, own.o_proj),)
    both = draw(2 * mlp.gate_proj.out_features)
    yield "mlp.act_fn", (both,), (silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],)
    yield "self_attn.rotary_emb", (torch.arange(TOKENS), q, k), (turned(q), turned(k))


def record_of(model, planted=None):
    calls = []
    for name, inputs, outputs in calls_of(model):
        outputs = tuple(each.bfloat16().float() for each in outputs)
        if name == planted:  # one bit of one number
            outputs[0].view(torch.int32)[-1, -1] ^= 1 << 16
        kept = tuple(each.float() if each.is_floating_point() else each for each in inputs)
        # One rotary embedding turns queries and keys of all layers, in their order; this one is the first's.
        calls.append({"name": AT + name, "inputs": kept, "outputs": outputs})
    head = torch.zeros(TOKENS, model.config.vocab_size)
    calls.append(
        {"name": "logits_processor", "inputs": (torch.zeros(TOKENS, model.config.hidden_size),), "outputs": (head,)}
    )
    return {"dtype": "bfloat16", "arithmetic": "exact", "calls": calls}


@torch.no_grad()
def test_one_bit_of_one_operation_is_named(model):
    assert first_unequal(model, record_of(model)) is None
    for name, _, _ in calls_of(model):
        kind = first_unequal(model, record_of(model, planted=name))
        assert kind is not None and kind.endswith(f"({AT}{name})")
