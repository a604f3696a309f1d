"""Which responses are kept: the shares by hand, no duplicates, and the same however the step is cut."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.mismatch.candidates import Candidates, lot_of, shares_of
from verl_precision.mismatch.packing import flattened


def test_shares():
    for keep, shares in {0: (0, 0, 0), 1: (1, 0, 0), 2: (1, 1, 0), 4: (2, 1, 1), 16: (6, 5, 5)}.items():
        assert shares_of(keep) == shares and sum(shares) == keep


def chosen(gaps, keep, lots=None, mask=None) -> dict[int, str]:
    """Return row -> reason of what is kept of responses with these gaps."""
    gaps = torch.tensor(gaps)
    lots = lots or list(range(len(gaps)))
    mask = torch.ones_like(gaps) if mask is None else torch.tensor(mask)
    mu = torch.full_like(gaps, -2.0)
    found = Candidates.of_batch(keep, lots, flattened(mu + gaps, mu, mask=mask)).chosen()
    assert len({one.lot for one, _ in found}) == len(found)
    return {lots.index(one.lot): reason for one, reason in found}


def test_by_hand():
    """|log-weights| 0.4, 0.5, 0, 0.1, 0; largest gaps 0.2, 0.3, 0.9, 0.1, 0."""
    gaps = [[0.2, 0.2], [-0.3, -0.2], [0.9, -0.9], [0.1, 0.0], [0.0, 0.0]]
    assert chosen(gaps, 1) == {1: "largest weight"}
    assert chosen(gaps, 2) == {1: "largest weight", 2: "largest gap"}
    lots = [5, 4, 3, 2, 1]
    assert chosen(gaps, 4, lots) == {1: "largest weight", 0: "largest weight", 2: "largest gap", 4: "random"}
    assert set(chosen(gaps, 16)) == {0, 1, 2, 3, 4}, "fewer than asked for: all"


def test_what_is_masked_never_matters_padding_is_never_chosen_and_nan_comes_first():
    nan = math.nan
    gaps = [[0.1, nan], [0.2, 9.0], [nan, nan], [0.5, 0.5]]
    mask = [[1, 0], [1, 0], [0, 0], [1, 1]]
    assert chosen(gaps, 4, [0, 1, 2, -1], mask).keys() == {0, 1}
    assert chosen([[5.0], [nan], [1.0]], 1) == {1: "largest weight"}
    assert chosen([[0.0, 0.0], [math.inf, -math.inf], [1.0, 0.0]], 1) == {1: "largest weight"}


def test_it_carries_the_trainers_and_the_shadows_log_probs_without_padding():
    trainer, shadow = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -2.5, -9.0]])
    batch = flattened(trainer, shadow, trainer - 0.1, mask=torch.tensor([[1, 0, 0]]))
    ((one, _),) = Candidates.of_batch(1, [7], batch, lengths=[2]).chosen()
    assert one.log_probs.tolist() == [-1.0, -2.0] and one.shadow_log_probs.tolist() == [-1.5, -2.5]
    assert one.log_weight == pytest.approx(0.1) and one.largest_gap == pytest.approx(0.1)


def test_lots_depend_on_step_and_identity_alone():
    assert lot_of(3, "u_0_0") == lot_of(3, "u_0_0") and len({lot_of(step, "u_0_0") for step in range(100)}) == 100


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 12))
def test_the_same_however_it_is_cut(data, keep, rows):
    """Into pieces in any order, padded or nested; ties are broken by lot."""
    steps = st.integers(-3, 3).map(lambda number: number / 4)
    gaps = [data.draw(st.lists(steps, min_size=1, max_size=4)) for _ in range(rows)]
    lots = data.draw(st.permutations(range(rows)))
    rows_of = [torch.tensor(row) - 3 for row in gaps]

    def measured(some: list[int], padded: bool) -> Candidates:
        pi = [rows_of[row] for row in some]
        mu, ones = [torch.full_like(row, -3.0) for row in pi], [torch.ones_like(row) for row in pi]
        nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        layout = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True) if padded else nested
        batch = flattened(layout(pi), layout(mu), mask=layout(ones))
        lengths = [len(row) for row in pi] if padded else None
        return Candidates.of_batch(keep, [lots[row] for row in some], batch, lengths)

    def said(found: Candidates) -> list:
        return [(one.lot, one.log_weight, one.log_probs.tolist(), reason) for one, reason in found.chosen()]

    whole = said(measured(list(range(rows)), padded=True))
    assert len(whole) == min(keep, rows)
    order, pieces = data.draw(st.permutations(range(rows))), Candidates(keep)
    cut = data.draw(st.integers(0, rows))
    for piece in (order[:cut], order[cut:]):
        if piece:
            pieces = measured(piece, padded=data.draw(st.booleans())).merge(pieces)
    assert said(pieces) == whole
