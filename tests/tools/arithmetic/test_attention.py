"""Causal attention over spans: packed is padded, page by page is at once, and no sequence sees another."""

import math

import pytest
import torch
from torch import Tensor

from verl_precision.tools.arithmetic import attention as module
from verl_precision.tools.arithmetic.attention import AttentionSpan, attention, packed, plan

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


@pytest.fixture(params=[(128, 2**14), (4, 2**14), (3, 1)], ids=["at once", "cut", "cut, one by one"])
def cut(request, monkeypatch):
    """Cut spans as long ones are."""
    monkeypatch.setattr(module, "_QUERIES", request.param[0])
    monkeypatch.setattr(module, "_KEYS", request.param[1])


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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("left", [False, True])
def test_padded_is_packed(dtype, left):
    given = operands(dtype)
    at_once = attention(*given, SCALE, packed(POSITIONS[None], None), inner=torch.float64)
    longest = max(LENGTHS)
    real = torch.stack([torch.arange(longest) < length for length in LENGTHS])
    real = real.flip(1) if left else real
    positions = torch.full(real.shape, 1 if left else 0)  # of padding, as transformers and verl write them
    positions[real] = POSITIONS
    padded = []
    for x in given:
        wide = torch.full((*real.shape, *x.shape[1:]), float("nan"), dtype=dtype)
        wide[real] = x
        padded.append(wide.flatten(0, 1))
    found = attention(*padded, SCALE, packed(positions, real), inner=torch.float64).view(*real.shape, 6, 16)
    assert torch.equal(found[real], at_once) and not found[~real].any()


@pytest.mark.parametrize("dtype", HALF)
def test_token_by_token_from_pages_is_at_once(dtype):
    """A server computes a prompt in chunks, then token by token, and several requests at a time."""
    q, k, v = operands(dtype, tokens=40)
    lengths, exact = (17, 23), {"inner": torch.float64}
    at_once = attention(q, k, v, SCALE, packed(torch.cat([*map(torch.arange, lengths)])[None], None), **exact)
    places = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40].split(lengths)
    cache = [torch.full((64, 2, 16), float("nan"), dtype=dtype) for _ in range(2)]
    for kept, x in zip(cache, (k, v), strict=True):
        kept[torch.cat(places)] = x
    found = torch.zeros_like(at_once)
    for (a, b), (c, d) in [((0, 9), (0, 14)), ((9, 16), (14, 15)), ((16, 17), (15, 23))]:  # queries of both requests
        requests = [AttentionSpan(0, b - a, places[0][:b]), AttentionSpan(b - a, d - c, places[1][:d])]
        result = attention(torch.cat((q[a:b], q[17 + c : 17 + d])), *cache, SCALE, plan(requests), **exact)
        found[a:b], found[17 + c : 17 + d] = result.split([b - a, d - c])
    assert torch.equal(found, at_once)
    assert not torch.equal(attention(q, k, v, SCALE, packed(torch.arange(40)[None], None), **exact), at_once)


def test_a_sequence_that_overflows_harms_no_other():
    q, k, v = operands(torch.float16)
    good = attention(q, k, v, SCALE, packed(POSITIONS[None], None), inner=torch.float64)
    v[6:10], k[12] = float("inf"), float("nan")
    bad = attention(q, k, v, SCALE, packed(POSITIONS[None], None), inner=torch.float64)
    elsewhere = torch.ones(len(q), dtype=torch.bool)
    elsewhere[5:24] = False
    assert torch.equal(bad[elsewhere], good[elsewhere]) and not bad[5:24].isfinite().all()
