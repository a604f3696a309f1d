"""Causal attention over spans: no sequence sees another. Padded: test_trainer_arithmetic.py; pages: the real vLLM."""

import math

import pytest
import torch
from torch import Tensor

from verl_precision.tools.arithmetic import operations as module
from verl_precision.tools.arithmetic.operations import attention, packed

HALF = [torch.bfloat16, torch.float16]
LENGTHS, SCALE = (5, 19, 1, 19, 8), 16**-0.5
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def operands(dtype: torch.dtype, tokens: int = sum(LENGTHS)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 16, generator=generator).to(dtype) for heads in (6, 2, 2)]


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Return the attention of each sequence by itself, of each head by itself."""
    results, start = [], 0
    for length in lengths:
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


@pytest.fixture(params=[128, 4], ids=["at once", "cut"])
def cut(request, monkeypatch):
    """Cut spans as long ones are."""
    monkeypatch.setattr(module, "_QUERIES", request.param)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_packed_sequences(dtype, cut):
    given = operands(dtype)
    expected = plain(*(x.double() for x in given)).to(dtype)
    assert torch.equal(attention(*given, SCALE, packed(POSITIONS[None], None), inner=torch.float64), expected)


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", HALF)
def test_the_gradient_is_rounded_once(dtype, inner, cut):
    given = [x.requires_grad_() for x in operands(dtype)]
    above = operands(dtype)[0]
    with torch.autocast("cpu", dtype):
        attention(*given, SCALE, packed(POSITIONS[None], None), inner=inner).backward(above)
    wide = [x.detach().double().requires_grad_() for x in given]
    plain(*wide).backward(above.double())
    for x, w in zip(given, wide, strict=True):
        assert x.grad.dtype == dtype
        assert torch.allclose(x.grad.double(), w.grad, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_sequence_that_overflows_harms_no_other():
    q, k, v = operands(torch.float16)
    good = attention(q, k, v, SCALE, packed(POSITIONS[None], None), inner=torch.float64)
    v[6:10], k[12] = float("inf"), float("nan")
    bad = attention(q, k, v, SCALE, packed(POSITIONS[None], None), inner=torch.float64)
    elsewhere = torch.ones(len(q), dtype=torch.bool)
    elsewhere[5:24] = False
    assert torch.equal(bad[elsewhere], good[elsewhere]) and not bad[5:24].isfinite().all()
