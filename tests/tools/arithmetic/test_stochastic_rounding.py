"""Stochastic rounding: unbiased, on the grid, the same for the same seed; infinities and NaN stay what they are."""

import pytest
import torch
import verl.workers.engine  # noqa: F401 - it imports what is tested here
from digests import digest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.tools.arithmetic import stochastic_rounding
from verl_precision.tools.arithmetic.stochastic_rounding import round_stochastically, rounded_stream, seed_of
from verl_precision.weight_sync.manifest import read_manifest, rounded_on_the_way, send_with_manifest

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def neighbours(x, dtype):
    """The largest number of the dtype that is not above x, and the smallest that is not below, among all of them."""
    grid = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    grid = grid[grid.isfinite()].sort().values
    return grid[torch.searchsorted(grid, x, right=True) - 1], grid[torch.searchsorted(grid, x)]


# Of both dtypes: ordinary numbers of either sign, numbers that are subnormal in FP16, in BF16, and FP32's smallest.
# 1.001 is an eighth of a unit above 1 in BF16: nearest serves 1 for ever.
ORDINARY = [1.001, -1.001, 3.14159, -0.0123456, 1.0 + 2**-23, -(2 - 2**-20), 300.7]
SMALL = [1e-6, -3.3e-8, 5.9e-8, 1.1e-38, -3e-39, 7e-41, 1e-45]


@DTYPES
def test_unbiased_and_on_the_grid(dtype):
    """Over 4,000 steps the mean is within 4.5 standard errors √(f(1 - f)/4000) units of the weight."""
    x, steps = torch.tensor(ORDINARY + SMALL), 4000
    below, above = neighbours(x, dtype)
    drawn = torch.stack([round_stochastically(x, dtype, seed_of(step, "a")) for step in range(steps)]).float()
    assert ((drawn == below) | (drawn == above)).all()
    unit, low, mean = (above - below).double(), below.double(), drawn.double().mean(0)
    share = (x.double() - low) / unit
    error = (share * (1 - share) / steps).sqrt().clamp(min=1 / steps / 4.5)
    assert ((mean - x.double()).abs() <= 4.5 * error * unit).all()
    halves = (share > 0.01) & (share < 0.99)
    assert halves.sum() > 5 and all(len(set(column.tolist())) == 2 for column in drawn.T[halves])


@DTYPES
def test_what_the_dtype_can_hold_is_unchanged(dtype):
    """All 65,536 patterns: ±0, subnormal numbers, ±inf, and NaN, which stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    served = round_stochastically(every.float(), dtype, seed=3)
    nan = every.isnan()
    assert torch.equal(served.isnan(), nan)
    assert torch.equal(served[~nan].view(torch.int16), every[~nan].view(torch.int16))


@DTYPES
@given(st.floats(width=32, allow_nan=False), st.integers(0, 2**63 - 1))
def test_every_number_goes_to_a_neighbour(dtype, x, seed):
    x = torch.tensor([x])
    served = round_stochastically(x, dtype, seed)
    if x.abs() > torch.finfo(dtype).max:
        assert torch.equal(served, x.to(dtype))
    else:
        assert served.float() in torch.stack(neighbours(x, dtype))
        assert served.signbit() == x.signbit()


def test_two_replicas_get_equal_bits_and_steps_and_tensors_differ():
    weights = {"a": torch.rand(999), "b": torch.rand(999)}
    weights["c"] = weights["a"]

    def sent(step):
        found = dict(send_with_manifest(rounded_stream(weights.items(), torch.bfloat16, step)))
        digests, _ = read_manifest(found.popitem()[1])
        tensors = {name: found[name] for name in weights}
        assert digests == {name: digest(tensor) for name, tensor in tensors.items()}, "of what is sent"
        assert not rounded_on_the_way({name: t.dtype for name, t in tensors.items()}, torch.bfloat16)
        return tensors

    one, other, later = sent(5), sent(5), sent(6)
    assert all(torch.equal(one[name], other[name]) for name in weights)
    assert not any(torch.equal(one[name], later[name]) for name in weights)
    assert not torch.equal(one["a"], one["c"]), "tensors of one value do not share their draws"


def test_only_fp32_is_rounded():
    weights = {"half": torch.rand(9).half(), "steps": torch.tensor([3]), "double": torch.rand(9).double()}
    assert all(sent is weights[name] for name, sent in rounded_stream(weights.items(), torch.bfloat16, 0))


def test_a_shape_that_is_rounded_in_chunks(monkeypatch):
    """The draws go on from chunk to chunk; empty tensors and views are no exception."""
    monkeypatch.setattr(stochastic_rounding, "_CHUNK", 64)
    rows = round_stochastically(torch.rand(1, 64).expand(3, 64), torch.bfloat16, 1)
    assert rows.shape == (3, 64) and not torch.equal(rows[0], rows[1]), "each chunk has draws of its own"
    x = torch.rand(30, 10)
    turned = round_stochastically(x.t(), torch.bfloat16, 1)
    assert torch.equal(turned, round_stochastically(x.t().contiguous(), torch.bfloat16, 1))
    assert round_stochastically(torch.empty(0, 4), torch.float16, 1).shape == (0, 4)
