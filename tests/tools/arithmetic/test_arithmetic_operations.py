"""Operations that are rounded once: the number nearest to the true one, in whatever order, batch or split."""

import pytest
import torch
from torch import Tensor

from verl_precision.tools.arithmetic import operations as ours

HALF = [torch.bfloat16, torch.float16]
INNER = {"rounded_once": torch.float32, "exact": torch.float64}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
POSITIONS, CHOSEN = torch.arange(24) * 7, torch.arange(48).view(24, 2) * 5 % 6
FREQUENCIES = ours.rotary_frequencies(LLAMA3, 16)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def norm(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(()).double(), POSITIONS[:, None, None] * FREQUENCIES)
    y = torch.complex(x[..., :8], x[..., 8:]) * turns
    return torch.cat((y.real, y.imag), -1)


def weights(logits: Tensor) -> Tensor:
    return logits.softmax(-1).topk(2).values


# name: ours, the plain formula for float64, shapes of the operands
OPERATIONS = {
    "linear": (ours.linear, torch.nn.functional.linear, [(24, 64), (40, 64), (40,)]),
    "linear_without_bias": (ours.linear, torch.nn.functional.linear, [(2, 12, 64), (40, 64)]),
    "rms_norm": (lambda x, w, inner: ours.rms_norm(x, w, 1e-6, inner=inner), norm, [(24, 64), (64,)]),
    "silu_and_mul": (ours.silu_and_mul, lambda g, u: silu(g) * u, [(24, 64), (24, 64)]),
    "rotary": (lambda x, inner: ours.rotary(x, POSITIONS, FREQUENCIES, inner=inner), turned, [(24, 3, 16)]),
    "route": (lambda x, inner: ours.route(x, 2, False, inner=inner)[0], weights, [(24, 6)]),
    "route_renormalized": (
        lambda x, inner: ours.route(x, 2, True, inner=inner)[0],
        lambda x: weights(x) / weights(x).sum(-1, keepdim=True),
        [(24, 6)],
    ),
}


def operands(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_exact_is_the_true_number_rounded_once(name, dtype):
    operation, formula, shapes = OPERATIONS[name]
    given = operands(shapes, dtype)
    found = operation(*given, inner=torch.float64)
    assert found.dtype == dtype
    assert torch.equal(found, formula(*(x.double() for x in given)).to(dtype))


@pytest.mark.parametrize("arithmetic", INNER)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_gradient_is_the_formulas_rounded_once(name, dtype, arithmetic):
    operation, formula, shapes = OPERATIONS[name]
    given = [x.requires_grad_() for x in operands(shapes, dtype)]
    alone = operation(*given, inner=INNER[arithmetic])
    with torch.autocast("cpu", dtype):  # as verl runs its forward: it must not round inside
        result = operation(*given, inner=INNER[arithmetic])
        assert torch.equal(result, alone)
        above = operands([tuple(result.shape)], dtype)[0]
        result.backward(above)
    wide = [x.detach().double().requires_grad_() for x in given]
    formula(*wide).backward(above.double())
    spacing = torch.finfo(dtype).eps
    for x, w in zip(given, wide, strict=True):
        assert x.grad.dtype == dtype
        assert torch.allclose(x.grad.double(), w.grad, rtol=0.51 * spacing, atol=1e-5 * w.grad.abs().max().item())


@pytest.mark.parametrize("dtype", HALF)
def test_the_order_of_a_sum_does_not_show(dtype):
    x, w, down = operands([(96, 640), (512, 640), (64, 512)], dtype)
    order = torch.randperm(640, generator=torch.Generator().manual_seed(1))
    for inner, equal in ((torch.float64, True), (torch.float32, False)):
        at_once = ours.linear(x, w, inner=inner)
        assert torch.equal(ours.linear(x[:, order], w[:, order], inner=inner), at_once) == equal
    exact = {"inner": torch.float64}
    assert torch.equal(torch.cat([ours.linear(row, w, **exact) for row in x.split(7)]), ours.linear(x, w, **exact))
    scale = w[0]
    normed = ours.rms_norm(x, scale, 1e-6, **exact)
    assert torch.equal(ours.rms_norm(x[:, order], scale[order], 1e-6, **exact)[:, order.argsort()], normed)
    gate_up, back = w.view(2, 256, 640), down.view(2, 32, 512)[:, :, :128]
    chosen, share = torch.tensor([[0, 1], [1, 0]]).repeat(48, 1), torch.rand(96, 2).to(dtype)
    whole = ours.experts(x, chosen, share, gate_up, back, **exact)
    split = zip(x.split(5), chosen.split(5), share.split(5), strict=True)
    parts = [ours.experts(*part, gate_up, back, **exact) for part in split]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("block", [1, 64 * 64, 2**20])
def test_a_large_weight_is_widened_in_blocks(block, monkeypatch):
    monkeypatch.setattr(ours, "_BLOCK", block)
    given = [x.requires_grad_() for x in operands([(24, 64), (40, 64), (40,)], torch.bfloat16)]
    result = ours.linear(*given, inner=torch.float64)
    result.sum().backward()
    wide = [x.detach().double().requires_grad_() for x in given]
    expected = torch.nn.functional.linear(*wide)
    expected.sum().backward()
    assert torch.equal(result, expected.bfloat16())
    for x, w in zip(given, wide, strict=True):
        assert torch.allclose(x.grad.double(), w.grad, rtol=2**-8, atol=1e-5)


def test_ties_go_to_the_first_experts_and_one_topk_chooses(monkeypatch):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]).bfloat16()
    assert ours.route(logits, 2, True, inner=torch.float64)[1].tolist() == [[1, 2], [0, 1]]
    calls, topk = [], torch.topk
    monkeypatch.setattr(torch, "topk", lambda *args, **kwargs: calls.append(args) or topk(*args, **kwargs))
    ours.route(logits, 2, True, inner=torch.float64)
    assert [(tuple(scores.shape), k) for scores, k in calls] == [((2, 5), 2)]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_experts(dtype):
    x, gate_up, down, share = operands([(24, 32), (6, 80, 32), (6, 32, 40), (24, 2)], dtype)
    given = [y.requires_grad_() for y in (x, share, gate_up, down)]
    result = ours.experts(x, CHOSEN, share, gate_up, down, inner=torch.float64)
    expected = torch.zeros(24, 32).double()
    for token in range(24):
        for place, expert in enumerate(CHOSEN[token]):
            gate, up = (gate_up[expert].double() @ x[token].double()).to(dtype).double().chunk(2)
            back = (down[expert].double() @ (silu(gate) * up).to(dtype).double()).to(dtype)
            expected[token] += share[token, place].double() * back.double()
    assert torch.equal(result, expected.to(dtype))
    result.sum().backward()
    assert all(y.grad.dtype == dtype and y.grad.isfinite().all() and y.grad.abs().sum() > 0 for y in given)
    alone = ours.experts(x, torch.zeros_like(CHOSEN), share, gate_up, down, inner=torch.float64)
    assert alone.isfinite().all(), "experts that nobody chose"


def test_llama3_slows_slow_turns():
    plain = ours.rotary_frequencies({"rope_type": "default", "rope_theta": 5e5}, 16)
    assert torch.allclose(plain, torch.tensor([5e5 ** (-i / 8) for i in range(8)]).double())
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(rope_parameters=LLAMA3, hidden_size=64, num_attention_heads=4, head_dim=16)
    assert torch.allclose(FREQUENCIES.float(), ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0], rtol=1e-6)
    assert not torch.allclose(FREQUENCIES, plain)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("route")])
@pytest.mark.parametrize("extreme", [60000.0, float("inf"), float("-inf"), float("nan")])
def test_extremes_are_as_natively(name, extreme):
    operation, formula, shapes = OPERATIONS[name]
    given = operands(shapes, torch.float16)
    given[0][0] = extreme
    found = operation(*given, inner=torch.float64)
    expected = formula(*(x.double() for x in given)).half()
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("inner", INNER.values())
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "rotary"])
def test_nothing_gives_nothing(name, inner):
    operation, _, shapes = OPERATIONS[name]
    given = [x.requires_grad_() for x in operands(shapes, torch.bfloat16)]
    rows = given[0][:0]
    if name == "silu_and_mul":
        given[1] = given[1][:0]
    result = operation(rows, *given[1:], inner=inner)
    assert not result.numel()
    result.sum().backward()
