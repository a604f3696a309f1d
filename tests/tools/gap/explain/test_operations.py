"""Operations of a forward with one planted error: the operation is named, and its share is the whole gap.

The forward is written out here, in vLLM's layout, so that the record needs no vLLM; `tests/e2e/test_explain.py` has one
of vLLM's own.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from verl_precision.tools.engines.engine import Request
from verl_precision.tools.gap.explain.operations import OperationComparer, compare, read_operations
from verl_precision.tools.tiny_model import cached_tiny_model

IDS = [5, 17, 80, 33, 91, 2, 64, 47, 12]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "qwen3_moe"])
def model(request):
    loaded = AutoModelForCausalLM.from_pretrained(cached_tiny_model(request.param), dtype=torch.float32)
    return loaded.eval()


def record_of(model, plant=lambda kind, layer, value: value, dtype="float32"):
    """Write a forward as vLLM records it; `plant` may change the output of an operation."""
    calls, layer = [], None

    def call(name, inputs, outputs):
        kind = name.rpartition(".")[2]
        outputs = tuple(plant(kind, layer, value) for value in outputs)
        calls.append({"name": name, "inputs": inputs, "outputs": outputs})
        return outputs

    def norm(name, module, x, residual):
        if residual is None:
            return call(name, (x,), (module(x),))[0], x
        inputs, total = (x, residual), plant("residual", layer, x + residual)
        normed = plant(name.rpartition(".")[2], layer, module(total))
        calls.append({"name": name, "inputs": inputs, "outputs": (normed, total)})
        return normed, total

    inner, length, positions = model.model, len(IDS), torch.arange(len(IDS))
    source = __import__(type(inner).__module__, fromlist=["apply_rotary_pos_emb"])
    (x,), residual = call("model.embed_tokens", (torch.tensor(IDS),), (inner.embed_tokens(torch.tensor(IDS)),)), None
    for layer, block in enumerate(inner.layers):
        at, own = f"model.layers.{layer}.", block.self_attn
        x, residual = norm(at + "input_layernorm", block.input_layernorm, x, residual)
        parts = (own.q_proj, own.k_proj, own.v_proj)
        (qkv,) = call(at + "self_attn.qkv_proj", (x,), (torch.cat([part(x) for part in parts], -1),))
        q, k, v = (each.contiguous() for each in qkv.split([part.out_features for part in parts], -1))
        if hasattr(own, "q_norm"):
            q, k = (t.view(length, -1, own.head_dim) for t in (q, k))
            (q,) = call(at + "self_attn.q_norm", (q,), (own.q_norm(q),))
            (k,) = call(at + "self_attn.k_norm", (k,), (own.k_norm(k),))
            q, k = q.flatten(1), k.flatten(1)
        cos, sin = inner.rotary_emb(q[None], positions[None])
        heads = [t.view(1, length, -1, own.head_dim).transpose(1, 2) for t in (q, k)]
        turned = tuple(t[0].transpose(0, 1).flatten(1) for t in source.apply_rotary_pos_emb(*heads, cos, sin))
        q, k = call("model.layers.0.self_attn.rotary_emb", (positions, q, k), turned)
        heads = [t.view(1, length, -1, own.head_dim).transpose(1, 2) for t in (q, k, v)]
        attended = scaled_dot_product_attention(*heads, is_causal=True, scale=own.scaling, enable_gqa=True)
        (x,) = call(at + "self_attn.attn", (q, k, v), (attended[0].transpose(0, 1).flatten(1),))
        (x,) = call(at + "self_attn.o_proj", (x,), (own.o_proj(x),))
        x, residual = norm(at + "post_attention_layernorm", block.post_attention_layernorm, x, residual)
        if hasattr(block.mlp, "gate"):
            (scores,) = call(at + "mlp.gate", (x,), (torch.nn.functional.linear(x, block.mlp.gate.weight),))
            probs, chosen = scores.softmax(-1).topk(block.mlp.gate.top_k)
            weights = probs / probs.sum(-1, keepdim=True)
            (x,) = call(at + "mlp.experts", (x, x), (block.mlp.experts(x, chosen, weights),))
        else:
            both = (block.mlp.gate_proj(x), block.mlp.up_proj(x))
            (both,) = call(at + "mlp.gate_up_proj", (x,), (torch.cat(both, -1),))
            gate, up = both.chunk(2, -1)
            (x,) = call(at + "mlp.act_fn", (both,), (block.mlp.act_fn(gate) * up,))
            (x,) = call(at + "mlp.down_proj", (x,), (block.mlp.down_proj(x),))
    layer = None
    x, _ = norm("model.norm", inner.norm, x, residual)
    call("logits_processor", (x[-1:],), (model.lm_head(x[-1:]),))
    call("logits_processor", (x[:-1],), (model.lm_head(x[:-1]),))
    return {"token_ids": IDS, "dtype": dtype, "calls": calls}


def compared(model, **plant):
    with torch.no_grad():
        return compare(model, record_of(model, **plant))


def test_equal_engines_differ_by_fp32_alone(model):
    found = compared(model)
    assert found.first is None and found.nats < 1e-6 and found.remainder < 1e-6
    assert max(one.error for one in found.operations) < 1e-6


@pytest.mark.parametrize(("module", "kind"), {
    "embed_tokens": "embeddings", "residual": "residual", "input_layernorm": "input norm", "qkv_proj": "qkv",
    "q_norm": "qk norm", "rotary_emb": "rotary", "attn": "attention", "o_proj": "output projection",
    "post_attention_layernorm": "post-attention norm", "gate_up_proj": "gate and up", "act_fn": "activation",
    "down_proj": "down", "gate": "router", "experts": "experts", "norm": "final norm", "logits_processor": "head",
}.items())  # fmt: skip
def test_planted_error_is_named_and_has_the_whole_gap(model, module, kind):
    place = None if module in ("embed_tokens", "norm", "logits_processor") else 1
    size = 0.3 if kind == "router" else 1e-3  # the experts of a tiny model hardly differ

    def plant(name, layer, value):
        if (name, layer) != (module, place):
            return value
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        return value + size * value.square().mean().sqrt() * noise

    found = compared(model, plant=plant)
    by_kind = {one.kind: one for one in found.operations}
    if kind not in by_kind:
        pytest.skip("the model has no such operation")
    assert by_kind[kind].share == pytest.approx(1, abs=1e-2)
    assert found.first is not None and found.first.startswith(f"{kind} (")
    assert by_kind[kind].layer == place
    assert by_kind[kind].error == pytest.approx(size, rel=0.5)
    of_place = zip((None, *range(model.config.num_hidden_layers)), by_kind[kind].errors, strict=True)
    assert [where for where, error in of_place if error is not None and error > size / 2] == [place]
    assert found.nats > 1e-6 and found.remainder < 1e-2 * found.nats


def test_rounding_of_16_bits_is_no_first_difference(model):
    rounded = {"plant": lambda name, layer, value: value.bfloat16().float()}
    found = compared(model, **rounded, dtype="bfloat16")
    assert found.first is None
    assert sum(one.share for one in found.operations) == pytest.approx(1, abs=0.1)
    assert found.remainder < 1e-2 * found.nats
    assert compared(model, **rounded).first is not None, "what BF16 does is no rounding of FP32"


def test_a_file_comes_back_and_another_family_is_not_compared(model, tmp_path, monkeypatch):
    with torch.no_grad():
        torch.save(record_of(model), tmp_path / "record.pt")
    comparer = OperationComparer(model.config._name_or_path)
    comparer.submit([Request(str(tmp_path / "record.pt"), 0, (), record_to=str(tmp_path / "found.json"))])
    assert len(comparer.poll()) == 1 and comparer.poll() == []
    found = read_operations(tmp_path / "found.json")
    assert found.operations and found.first is None
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "model_type", "gemma3")
        assert compare(model, record_of(model)).operations == ()
    compiled = {**record_of(model), "calls": record_of(model)["calls"][-2:]}
    assert compare(model, compiled).operations == ()
