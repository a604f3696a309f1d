"""Each kind of statistic by hand: pieces are merged, and the formula is applied once."""

import functools
import math

import pytest
from torch import tensor

from verl_precision.base import mergeable
from verl_precision.base.mergeable import Correlation, Count, Deviation, Maximum, Mean, Minimum, RatioSampleSize, Slope
from verl_precision.losses.metrics import Quantile, extremes

NAN, INF = math.nan, math.inf


def merged(kind, pieces):
    return functools.reduce(kind.merge, [kind(*(tensor(part).double() for part in piece)) for piece in pieces])


@pytest.mark.parametrize(("kind", "pieces", "expected"), [
    (Count, [(2,), (3,)], 5),
    (Mean, [(3, 2), (6, 1)], 3),
    (Mean, [([1, 2], [1, 1]), ([4, 5], [1, 1])], 3),  # elements are pieces too
    (Mean, [(0, 0)], NAN),
    (Deviation, [(1, 1, 1), (5, 2, 13)], math.sqrt(14 / 3 - 4)),  # 1 and 2, 3
    (Maximum, [(1,), (6,)], 6),
    (Maximum, [(-INF,)], NAN),
    (Minimum, [(1,), (6,), (INF,)], 1),
    (Minimum, [(INF,)], NAN),
    (Correlation, [(1, 1, 1, -2, 4, -2), (1, -1, 1, 2, 4, -2)], -1),  # (1, -1), (-1, 1); d = y - x
    (Correlation, [(2, 2, 2, 0, 0, 0)], NAN),  # (1, 1) twice
    (Quantile, [([1, 2], 0.5), ([6], 0.5)], 2),  # it keeps every value
    (Quantile, [([], 0.5)], NAN),
    (Slope, [(10, 1, 0, 0, 1, 0), (10, 1, 2, 4, 2, 4)], 5),  # (0, 1) and (2, 2): half a unit of y for each of x
])  # fmt: skip
def test_value_by_hand(kind, pieces, expected):
    assert merged(kind, pieces).value() == pytest.approx(expected, nan_ok=True)


def test_ratio_sample_size_brings_pieces_to_one_scale():
    """ρ = e^1000 and e^1000 beside e^0: two of three responses count."""
    large = RatioSampleSize(*map(tensor, (2.0, 1000.0, 2.0, 2.0)))
    small = RatioSampleSize(*map(tensor, (1.0, 0.0, 1.0, 1.0)))
    for one, other in ((large, small), (small, large)):
        assert one.merge(other).values("ess") == {"ess": 2, "ess_fraction": pytest.approx(2 / 3)}


def test_extremes_of_a_piece_without_values_change_nothing():
    pieces = [extremes(tensor([2.0, 9.0]), tensor([True, False]), "x"), extremes(tensor([]), tensor([]).bool(), "x")]
    assert {name: found.value() for name, found in mergeable.merge_by_name(pieces).items()} == {"x_min": 2, "x_max": 2}
