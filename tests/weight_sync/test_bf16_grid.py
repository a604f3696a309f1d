"""The share of weights that cross to another BF16 value: by hand, on a sample, and without touching the stream."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.weight_sync.bf16_grid import CROSSINGS, OFF_GRID, SAMPLE, Bf16Grid, sample

ULP = 2.0**-7  # from 1 to 2 one unit in the last place of BF16: a quarter of it rounds to 1, three quarters round up
MOVED = [1 + ULP / 4, 1 + ULP, 1 + 0.75 * ULP, 1.0]
LARGE = torch.ones(8, SAMPLE)
ODD = {"steps": torch.tensor([3]), "empty": torch.empty(0, 4)}
WEIRD = [math.nan, math.inf, 1e-45, 0.0]  # the third, FP32's smallest, is below BF16's


def sync(grid, weights):
    """Send weights once, and return the metrics."""
    weights = {name: torch.as_tensor(weight) for name, weight in weights.items()}
    sent = list(grid.watch(weights.items()))
    assert [(name, id(weight)) for name, weight in sent] == [(name, id(weight)) for name, weight in weights.items()]
    return grid.take()


@pytest.mark.parametrize("syncs", [
    # against the sync before, not the first
    [({"a": [1.0] * 4}, {OFF_GRID: 0.0}), ({"a": MOVED}, {CROSSINGS: 0.5, OFF_GRID: 0.5}),
     ({"a": MOVED}, {CROSSINGS: 0.0, OFF_GRID: 0.5})],
    # of the large one only a sample is looked at; it counts as 8 x 4096 elements all the same
    [({"large": LARGE, "small": LARGE[0]}, {OFF_GRID: 0.0}),
     ({"large": 2 * LARGE, "small": LARGE[0] + 2.0**-20}, {CROSSINGS: pytest.approx(8 / 9), OFF_GRID: 1 / 9})],
    # the first sync with LoRA sends base and adapter, later ones the adapter alone: no crossings without a sync before
    [({"base": [1.0]}, {OFF_GRID: 0.0}), ({"adapter": [1.0] * 4}, {OFF_GRID: 0.0}),
     ({"adapter": [1.0, 1.0, 1.0, 2.0]}, {CROSSINGS: 0.25, OFF_GRID: 0.0})],
    # integers and empty tensors do not count, and NaN is off the grid
    [(ODD, {}), ({"a": WEIRD, **ODD}, {OFF_GRID: 0.5}), ({"a": WEIRD, **ODD}, {CROSSINGS: 0.0, OFF_GRID: 0.5})],
    # updates of an eighth of a unit add up until they cross; the fourth lies half way, and ties go to the even 1
    [({"a": [1.0]}, {OFF_GRID: 0.0}),
     *(({"a": [1 + step * ULP / 8]}, {CROSSINGS: step // 5, OFF_GRID: 1.0}) for step in range(1, 6))],
], ids=["by hand", "by size", "adapter", "odd", "small updates"])  # fmt: skip
def test_shares_by_hand(syncs):
    grid = Bf16Grid()
    for weights, expected in syncs:
        assert sync(grid, weights) == pytest.approx(expected)


def test_the_streams_of_a_sync_count_together_and_nothing_sent_is_nothing():
    grid = Bf16Grid()
    assert grid.take() == {}
    list(grid.watch({"base": torch.ones(3)}.items()))
    assert sync(grid, {"adapter": [1 + 2.0**-20]}) == {OFF_GRID: 0.25}
    assert grid.take() == {}


def test_a_bf16_trainer_that_writes_in_place_is_seen():
    grid, weight = Bf16Grid(), torch.ones(4, dtype=torch.bfloat16)
    sync(grid, {"a": weight})
    weight[0] = 2
    assert sync(grid, {"a": weight}) == {CROSSINGS: 0.25, OFF_GRID: 0.0}


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_sample_is_small_and_every_column_has_a_part(rows, columns):
    """With a step that divides the row, all of it would be of one column. A small tensor is looked at whole."""
    found = sample(torch.arange(columns).repeat(rows, 1))
    assert min(rows * columns, SAMPLE) // 8 <= found.numel() <= SAMPLE
    assert rows * columns > SAMPLE or found.numel() == rows * columns
    counts = found.bincount(minlength=columns)
    assert counts.max() - counts.min() <= 1
