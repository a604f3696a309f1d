"""Verdicts by hand, and against every way the open responses could end."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.sanity_set.window import Verdict, Window


@pytest.mark.parametrize(
    ("correct", "drawn", "verdict"),
    [
        (0, 0, Verdict.OPEN),
        (8, 16, Verdict.KEPT),  # at least 8, and at most 8 + 24 = 32: inside [8, 32] whatever comes
        (8, 15, Verdict.OPEN),  # 33 is still possible
        (7, 15, Verdict.OPEN),
        (33, 33, Verdict.DROPPED),  # above 32 already
        (32, 32, Verdict.OPEN),
        (0, 32, Verdict.OPEN),  # 8 more may come: exactly 20%
        (0, 33, Verdict.DROPPED),
        (8, 40, Verdict.KEPT),  # exactly 20%: the ends belong to the window
        (32, 40, Verdict.KEPT),  # exactly 80%
        (7, 40, Verdict.DROPPED),
        (33, 40, Verdict.DROPPED),
    ],
)
def test_the_papers_window_by_hand(correct, drawn, verdict):
    assert Window().verdict(correct, drawn) is verdict


def test_the_fewest_that_decide_by_hand():
    """16 = 8 correct and 8 wrong keep; from 20 correct of 20, 8 wrong keep, or 13 more correct drop."""
    assert [Window().min_responses_to_decide(*drawn) for drawn in ((0, 0), (20, 20), (32, 32), (8, 16))] == [
        16,
        8,
        1,
        0,
    ]


@st.composite
def windows(draw) -> Window:
    responses = draw(st.integers(1, 12))
    low, high = sorted(draw(st.tuples(st.fractions(0, 1), st.fractions(0, 1))))
    try:
        return Window(responses, low, high)
    except ConfigurationError:
        return Window(responses, Fraction(0), high)


@given(windows(), st.data())
def test_decided_exactly_when_every_end_agrees_and_the_minimum_is_the_shortest_way_there(window, data):
    drawn = data.draw(st.integers(0, window.responses))
    correct = data.draw(st.integers(0, drawn))
    left = window.responses - drawn
    ends = {window.low <= Fraction(correct + more, window.responses) <= window.high for more in range(left + 1)}
    expected = Verdict.OPEN if len(ends) == 2 else Verdict.KEPT if ends == {True} else Verdict.DROPPED
    assert window.verdict(correct, drawn) is expected
    lengths = [
        length
        for length in range(window.responses - drawn + 1)
        if any(window.verdict(correct + c, drawn + length) is not Verdict.OPEN for c in range(length + 1))
    ]
    assert window.min_responses_to_decide(correct, drawn) == lengths[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((40, Fraction(4, 5), Fraction(1, 5)), "--low 0.8 --high 0.2"),
        ((40, Fraction(1, 5), Fraction(3, 2)), "Allowed: 0 <= low <= high <= 1"),
        ((10, Fraction(51, 100), Fraction(59, 100)), "nothing would be kept"),
    ],
)
def test_windows_that_cannot_work_are_refused(values, words):
    with pytest.raises(ConfigurationError, match=words):
        Window(*values)
