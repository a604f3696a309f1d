"""Products as sums of integers: those of Python's own integers, whatever the order, batch, kernel or size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.engine.arithmetic import integer_product as module
from verl_precision.engine.arithmetic.integer_product import cut, product
from verl_precision.engine.arithmetic.operations import linear

HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]
EXTREME = 253 / 256  # its slices are 127 and -128


def drawn(rows: int, entries: int, dtype: torch.dtype, spread: float = 0.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(rows, entries, generator=generator))
    return (torch.randn(rows, entries, generator=generator) * sizes).clamp(-6e4, 6e4).to(dtype)


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the product of rows of Python's integers, which have no largest one."""

    def integers(row: list[float]) -> tuple[list[int], int]:
        exponent = math.frexp((max(map(abs, row)) or 1.0) * 129 / 128)[1] + 1 - 8 * x.element_size()
        return [round(math.ldexp(value, -exponent)) for value in row], exponent

    pairs = [[(integers(a), integers(b)) for b in w.tolist()] for a in x.tolist()]
    sums = [[math.ldexp(sum(map(int.__mul__, a, b)), m + n) for (a, m), (b, n) in row] for row in pairs]
    return torch.tensor(sums, dtype=torch.float64)


@given(
    sizes=st.tuples(*[st.integers(1, 20)] * 3), spread=st.floats(0, 8), seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES), int8=st.booleans(), depth=st.sampled_from([3, 2**16]),
)  # fmt: skip
def test_it_is_the_product_of_integers(sizes, spread, seed, dtype, int8, depth):
    rows, columns, entries = sizes
    x, w = drawn(rows, entries, dtype, spread, seed), drawn(columns, entries, dtype, spread, seed + 1)
    x[seed % rows], int_mm = 0, torch._int_mm

    def as_cuda(a, b):
        assert a.shape[0] > 16 and not a.shape[1] % 8 and not b.shape[1] % 8, "sizes that CUDA does not take"
        return int_mm(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_int_mm", as_cuda)
        patch.setattr(module, "_DEPTH", depth)
        if not int8:
            patch.setattr(module, "_sums_are_exact", lambda device: False)
        found = product(cut(x), cut(w))
    bar = 1e-15 * (x.double().abs() @ w.double().abs().T) * (dtype == torch.float32)
    assert ((found - plain(x, w)).abs() <= bar).all() and not found[seed % rows].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_order_nor_batch_shows(dtype):
    x, w, order = drawn(96, 640, dtype), drawn(512, 640, dtype, seed=1), torch.randperm(640)
    at_once = product(cut(x), cut(w.T.contiguous().T))  # whatever its strides
    assert torch.equal(product(cut(x[:, order]), cut(w[:, order])), at_once)
    parts = [torch.cat([product(cut(rows), cut(some)) for some in w.split(100)], 1) for rows in x.split(7)]
    assert torch.equal(torch.cat(parts), at_once)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.02), (torch.float16, 0.4), (torch.float32, 0.02)])
def test_the_cut_is_small_beside_rounding_unless_an_entry_is_large(dtype, most):
    """Of normal numbers 0.005, 0.12 and 0.005 of it; beside one that is 4096 times as large 0.19 and 1.5 in 16 bits."""
    x, w = drawn(512, 576, dtype), drawn(1536, 576, dtype, seed=1)
    for factor, bar in ((1, most), (4096, 2)):
        x[:, 0] *= factor
        true = x.double() @ w.double().T
        assert 0 < (product(cut(x), cut(w)) - true).norm() < bar * (true.to(dtype).double() - true).norm()
    row = torch.tensor([[2.0**15, 0.5]], dtype=dtype)
    small = linear(row, torch.tensor([[0.0, 1.0]], dtype=dtype), inner=torch.int8)
    assert small == (0.5 if dtype == torch.float32 else 0), "below 2⁻¹⁶ of the largest entry, it is lost"


def test_sums_that_do_not_fit_are_split():
    x = torch.full((1, 2**17 + 8), EXTREME).bfloat16()  # 128²·(2¹⁷ + 8) is beyond INT32
    assert product(cut(x), cut(x)).item() == x.numel() * EXTREME**2


def test_a_kernel_that_saturates_is_not_used(run_python):
    """As those of a CPU without VNNI do: sums of two products, at 16 bits."""
    done = run_python(f"""
import os
os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
import torch
from verl_precision.engine.arithmetic.integer_product import cut, product
x = torch.full((8, 64), {EXTREME}).bfloat16()
print((product(cut(x), cut(x)) == 64 * {EXTREME}**2).all().item())
""")
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("extreme", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_harms_no_other(extreme):
    x, w = drawn(6, 40, torch.float16), drawn(9, 40, torch.float16, seed=1)
    good = linear(x, w, inner=torch.int8)
    x[2, 3] = w[4, 1] = extreme
    found = linear(x, w, inner=torch.int8)
    bad = torch.zeros(6, 9, dtype=torch.bool)
    bad[2], bad[:, 4] = True, True
    assert found[bad].isnan().all() and torch.equal(found[~bad], good[~bad])
    assert linear(x.new_full((1, 40), 6e4), x.new_full((1, 40), -6e4), inner=torch.int8) == float("-inf")
