"""The mismatch by turn: hand-derived numbers, tool output that never counts, and the same however it is cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.mismatch.groups import FURTHEST_TURN, MismatchByTurn, turns_of
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.statistics import MismatchStatistics


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def measured(pi, mu, mask, layout=padded) -> MismatchByTurn:
    tensors = [layout(rows) for rows in (pi, mu, mask)]
    lengths = None if layout is nested else torch.tensor([len(row) for row in mask])
    batch = flattened(*tensors[:2], mask=tensors[2])
    return MismatchByTurn.of_batch(batch, MismatchStatistics.of_batch(batch), lengths)


@pytest.mark.parametrize(("mask", "turns"), [
    ([1, 1, 1], [1, 1, 1]),
    ([1, 0, 0, 1, 1, 0, 1], [1, 0, 0, 2, 2, 0, 3]),
    ([0, 0, 1, 1, 0], [0, 0, 1, 1, 0]),
    ([0, 0], [0, 0]),
])  # fmt: skip
def test_a_turn_is_a_run_of_the_policys_tokens(mask, turns):
    """Each response has its own, one without tokens between them."""
    offsets = torch.tensor([0, len(mask), len(mask), len(mask) + 3, 2 * len(mask) + 3])
    assert turns_of(torch.tensor([*mask, 1, 0, 1, *mask]), offsets).tolist() == [*turns, 1, 0, 2, *turns]


@pytest.mark.parametrize("layout", [padded, nested])
def test_by_hand(layout):
    """Turn 1 has gaps ln 2, 0 and ln 2; turn 2 ln 2 and -ln 2; two of seven tokens are a tool's, with NaN log-probs."""
    ln2, nan = math.log(2), math.nan
    gaps = [torch.tensor([ln2, 0.0, nan, ln2, -ln2]), torch.tensor([ln2, math.inf])]
    mask = [torch.tensor([1, 1, 0, 1, 1]), torch.tensor([1, 0])]
    mu = [torch.full((len(row),), -3.0, dtype=torch.float64) for row in mask]
    found = measured([one + gap for one, gap in zip(mu, gaps, strict=True)], mu, mask, layout).metrics()
    k3, other = 1 - ln2, 0.5 - 1 + ln2  # e^g - 1 - g
    assert found == pytest.approx({
        "mismatch/turns_max": 2, "mismatch/tool_token_fraction": 2 / 7,
        "mismatch/turn_1/tokens": 3, "mismatch/turn_1/k3_kl": 2 * k3 / 3,
        "mismatch/turn_1/log_prob_gap_abs_mean": 2 * ln2 / 3,
        "mismatch/turn_2/tokens": 2, "mismatch/turn_2/k3_kl": (k3 + other) / 2,
        "mismatch/turn_2/log_prob_gap_abs_mean": ln2,
    })  # fmt: skip


@pytest.mark.parametrize("layout", [padded, nested])
def test_a_single_turn_has_no_metric_of_its_own(layout):
    mu = [torch.full((4,), -1.0), torch.full((2,), -1.0)]
    found = measured(mu, mu, [torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1])], layout)
    assert found.metrics() == {} == MismatchByTurn().metrics()


def test_late_turns_are_together():
    mask = torch.tensor([1, 0] * (FURTHEST_TURN + 3))
    metrics = measured([-1.0 * mask], [-1.1 * mask], [mask]).metrics()
    turns = {name: value for name, value in metrics.items() if name.endswith("/tokens")}
    sizes = enumerate([1] * (FURTHEST_TURN - 1) + [4], 1)
    assert turns == {f"mismatch/turn_{turn}/tokens": size for turn, size in sizes}
    assert metrics["mismatch/turns_max"] == FURTHEST_TURN + 3


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_the_same_however_it_is_cut_and_padded(data, rows):
    """Micro-batches of one turn beside others of several; what a tool wrote may hold anything."""
    masks = [torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))) for _ in range(rows)]
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    mu = [-torch.rand(len(mask), generator=random).double() - 1 for mask in masks]
    pi = [one + 0.1 * torch.randn(len(one), generator=random) for one in mu]
    whole = measured(pi, mu, masks).metrics()
    bad = data.draw(st.sampled_from([0.0, math.nan, math.inf]))
    pi = [torch.where(mask.bool(), one, bad) for one, mask in zip(pi, masks, strict=True)]
    pieces = MismatchByTurn()
    for row in range(rows):
        one = slice(row, row + 1)
        pieces = pieces.merge(measured(pi[one], mu[one], masks[one], data.draw(st.sampled_from([padded, nested]))))
    assert pieces.metrics() == pytest.approx(whole)
