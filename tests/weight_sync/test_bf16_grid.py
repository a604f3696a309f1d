"""The share of weights that cross to another BF16 value: by hand, on a sample, and without touching the stream."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.weight_sync.bf16_grid import CROSSINGS, OFF_GRID, SAMPLE, Bf16Grid, sample


def sync(grid, **weights):
    """Send weights once, and return the metrics."""
    sent = list(grid.watch(weights.items()))
    assert [(name, id(weight)) for name, weight in sent] == [(name, id(weight)) for name, weight in weights.items()]
    return grid.take()


def test_by_hand():
    """From 1 to 2 one unit in the last place of BF16 is 2⁻⁷: a quarter of it rounds to 1, three quarters round up."""
    grid, ulp = Bf16Grid(), 2.0**-7
    assert sync(grid, a=torch.tensor([1.0, 1.0, 1.0, 1.0])) == {OFF_GRID: 0.0}
    moved = torch.tensor([1 + ulp / 4, 1 + ulp, 1 + 0.75 * ulp, 1.0])
    assert sync(grid, a=moved) == {CROSSINGS: 0.5, OFF_GRID: 0.5}
    assert sync(grid, a=moved) == {CROSSINGS: 0.0, OFF_GRID: 0.5}, "against the sync before, not the first"


def test_updates_below_half_a_unit_add_up_until_they_cross():
    grid, weight, found = Bf16Grid(), torch.full((8,), 1.0), []
    for _ in range(5):
        found.append(sync(grid, a=weight).get(CROSSINGS))
        weight = weight + 2.0**-10  # an eighth of a unit; the fourth lies half way, and ties go to the even 1
    assert found == [None, 0.0, 0.0, 0.0, 0.0]
    assert sync(grid, a=weight)[CROSSINGS] == 1.0


def test_tensors_count_by_their_size():
    """Of the large one only a sample is looked at; it counts as 8 x 4096 elements all the same."""
    grid, large = Bf16Grid(), torch.ones(8, SAMPLE)
    sync(grid, large=large, small=torch.ones(SAMPLE))
    found = sync(grid, large=large * 2, small=torch.full((SAMPLE,), 1 + 2.0**-20))
    assert found == {CROSSINGS: pytest.approx(8 / 9), OFF_GRID: pytest.approx(1 / 9)}


def test_a_tensor_without_a_sync_before_has_no_crossings():
    """The first sync with LoRA sends base and adapter, later ones the adapter alone."""
    grid = Bf16Grid()
    sync(grid, base=torch.ones(100))
    assert sync(grid, adapter=torch.ones(4)) == {OFF_GRID: 0.0}
    assert sync(grid, adapter=torch.tensor([1.0, 1.0, 1.0, 2.0])) == {CROSSINGS: 0.25, OFF_GRID: 0.0}


def test_the_streams_of_a_sync_count_together_and_nothing_sent_is_nothing():
    grid = Bf16Grid()
    assert grid.take() == {}
    list(grid.watch({"base": torch.ones(3)}.items()))
    assert sync(grid, adapter=torch.tensor([1 + 2.0**-20])) == {OFF_GRID: 0.25}
    assert grid.take() == {}


def test_a_bf16_trainer_that_writes_in_place_is_seen():
    grid, weight = Bf16Grid(), torch.ones(4, dtype=torch.bfloat16)
    sync(grid, a=weight)
    weight[0] = 2
    assert sync(grid, a=weight) == {CROSSINGS: 0.25, OFF_GRID: 0.0}


def test_integers_and_empty_tensors_do_not_count_and_nan_is_off_the_grid():
    grid = Bf16Grid()
    odd = {"steps": torch.tensor([3]), "empty": torch.empty(0, 4)}
    assert sync(grid, **odd) == {}
    weight = torch.tensor([math.nan, math.inf, 1e-45, 0.0])  # the third, FP32's smallest, is below BF16's
    assert sync(grid, a=weight, **odd) == {OFF_GRID: 0.5}
    assert sync(grid, a=weight, **odd) == {CROSSINGS: 0.0, OFF_GRID: 0.5}


def test_the_standard_error_is_as_stated():
    """One tensor of which 30% cross: over 200 arrangements the estimates scatter by √(f(1 - f)/m·(1 - m/n))."""
    n, f, estimates = 4 * SAMPLE, 0.3, []
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        grid, crosses = Bf16Grid(), torch.zeros(n)
        crosses[torch.randperm(n, generator=generator)[: int(f * n)]] = 1
        sync(grid, a=torch.zeros(n))
        estimates.append(sync(grid, a=crosses)[CROSSINGS])
    looked_at = sample(torch.zeros(n)).numel()
    error = math.sqrt(f * (1 - f) / looked_at * (1 - looked_at / n))
    scatter = torch.tensor(estimates)
    assert abs(scatter.mean().item() - f) < 4 * error / math.sqrt(200)
    assert scatter.std().item() == pytest.approx(error, rel=0.2)  # 4 standard errors of a standard deviation of 200


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_sample_is_small_and_every_column_has_a_part(rows, columns):
    """With a step that divides the row, all of it would be of one column."""
    weight = torch.arange(columns).repeat(rows, 1)
    found = sample(weight)
    assert min(weight.numel(), SAMPLE) // 8 <= found.numel() <= SAMPLE
    counts = found.bincount(minlength=columns)
    assert counts.max() - counts.min() <= 1


def test_all_is_looked_at_where_it_fits():
    weight = torch.randn(64, 64)
    assert torch.equal(sample(weight), weight.flatten())
    assert sample(torch.tensor(1.0)).numel() == 1
