"""Operations that are rounded once: the number nearest to the true one, in whatever order, batch or split.

Causal attention over spans: no sequence sees another. Padded: test_trainer_arithmetic.py; pages: the real vLLM.
"""

import math

import pytest
import torch
from torch import Tensor

from verl_precision.tools.arithmetic import operations as ours

HALF = [torch.bfloat16, torch.float16]
INNER = {"rounded_once": torch.float32, "exact": torch.float64}
POSITIONS = torch.arange(24) * 7
FREQUENCIES = torch.tensor([5e5 ** (-i / 8) for i in range(8)]).double()
LENGTHS = (5, 19, 1, 19, 8)  # of packed sequences
PLACES = torch.cat([torch.arange(length) for length in LENGTHS])


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def norm(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(()).double(), POSITIONS[:, None, None] * FREQUENCIES)
    y = torch.complex(x[..., :8], x[..., 8:]) * turns
    return torch.cat((y.real, y.imag), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, inner: torch.dtype) -> Tensor:
    return ours.attention(q, k, v, 16**-0.5, ours.packed(PLACES[None], None), inner=inner)


def each_by_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of each sequence by itself, of each head by itself."""
    results, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        heads = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[rows, head] @ k[rows, group].T / math.sqrt(q.shape[2])
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            heads.append(scores.softmax(-1) @ v[rows, group])
        results.append(torch.stack(heads, 1))
        start += length
    return torch.cat(results)


# name: ours, the plain formula for float64, shapes of the operands
OPERATIONS = {
    "linear": (ours.linear, torch.nn.functional.linear, [(24, 64), (40, 64), (40,)]),
    "linear_without_bias": (ours.linear, torch.nn.functional.linear, [(2, 12, 64), (40, 64)]),
    "rms_norm": (lambda x, w, inner: ours.rms_norm(x, w, 1e-6, inner=inner), norm, [(24, 64), (64,)]),
    "silu_and_mul": (ours.silu_and_mul, lambda g, u: silu(g) * u, [(24, 64), (24, 64)]),
    "rotary": (lambda x, inner: ours.rotary(x, POSITIONS, FREQUENCIES, inner=inner), turned, [(24, 3, 16)]),
    "attention": (attention, each_by_itself, [(sum(LENGTHS), heads, 16) for heads in (6, 2, 2)]),
}


def operands(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("queries", [128, 4])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_exact_is_the_true_number_rounded_once(name, dtype, queries, monkeypatch):
    """However spans of attention are cut."""
    monkeypatch.setattr(ours, "_QUERIES", queries)
    operation, formula, shapes = OPERATIONS[name]
    given = operands(shapes, dtype)
    found = operation(*given, inner=torch.float64)
    assert found.dtype == dtype
    assert torch.equal(found, formula(*(x.double() for x in given)).to(dtype))


@pytest.mark.parametrize(("block", "queries"), [(1, 4), (64 * 24, 4), (2**20, 128)])
@pytest.mark.parametrize("arithmetic", INNER)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_gradient_is_the_formulas_rounded_once(name, dtype, arithmetic, block, queries, monkeypatch):
    """Whatever the blocks in which a large weight is widened, and however spans of attention are cut."""
    monkeypatch.setattr(ours, "_BLOCK", block)
    monkeypatch.setattr(ours, "_QUERIES", queries)
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
        near = 1e-5 * (1 if name == "attention" else w.grad.abs().max().item())
        assert torch.allclose(x.grad.double(), w.grad, rtol=0.51 * spacing, atol=near)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "attention"])
@pytest.mark.parametrize("extreme", [60000.0, float("inf"), float("-inf"), float("nan")])
def test_extremes_are_as_natively(name, extreme):
    operation, formula, shapes = OPERATIONS[name]
    given = operands(shapes, torch.float16)
    given[0][0] = extreme
    found = operation(*given, inner=torch.float64)
    expected = formula(*(x.double() for x in given)).half()
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_a_sequence_that_overflows_harms_no_other():
    q, k, v = operands(OPERATIONS["attention"][2], torch.float16)
    good = attention(q, k, v, torch.float64)
    v[6:10], k[12] = float("inf"), float("nan")
    bad = attention(q, k, v, torch.float64)
    elsewhere = torch.ones(len(q), dtype=torch.bool)
    elsewhere[5:24] = False
    assert torch.equal(bad[elsewhere], good[elsewhere]) and not bad[5:24].isfinite().all()
