"""Verdicts by hand and against every end; early stopping changes nothing but the work, in any order of return."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.base.errors import CheckpointStateError, ConfigurationError
from verl_precision.tools.evaluate.schedule import Schedule, Verdict, Window

N = 40


@pytest.mark.parametrize(("correct", "drawn", "verdict"), [
    (8, 16, Verdict.KEPT),  # at least 8, and at most 8 + 24 = 32: inside [8, 32] whatever comes
    (8, 15, Verdict.OPEN),  # 33 is still possible
    (33, 33, Verdict.DROPPED),  # above 32 already
    (0, 32, Verdict.OPEN),  # 8 more may come: exactly 20%
    (0, 33, Verdict.DROPPED),
    (8, 40, Verdict.KEPT),  # exactly 20%: the ends belong to the window
    (32, 40, Verdict.KEPT),  # exactly 80%
])  # fmt: skip
def test_the_papers_window_by_hand(correct, drawn, verdict):
    assert Window().verdict(correct, drawn) is verdict


def test_the_fewest_that_decide_by_hand():
    """16 = 8 correct and 8 wrong keep; from 20 correct of 20, 8 wrong keep, or 13 more correct drop."""
    fewest = {(0, 0): 16, (20, 20): 8, (32, 32): 1, (8, 16): 0}
    assert {drawn: Window().min_responses_to_decide(*drawn) for drawn in fewest} == fewest


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

    def may_decide(length):
        return any(window.verdict(correct + c, drawn + length) is not Verdict.OPEN for c in range(length + 1))

    assert window.min_responses_to_decide(correct, drawn) == next(filter(may_decide, range(left + 1)))


@pytest.mark.parametrize(("values", "words"), [
    ((40, Fraction(4, 5), Fraction(1, 5)), "--low 0.8 --high 0.2"),
    ((40, Fraction(1, 5), Fraction(3, 2)), "Allowed: 0 <= low <= high <= 1"),
    ((10, Fraction(51, 100), Fraction(59, 100)), "it keeps no problem"),
])  # fmt: skip
def test_windows_that_cannot_work_are_refused(values, words):
    with pytest.raises(ConfigurationError, match=words):
        Window(*values)


@st.composite
def tables(draw):
    """Problems of all difficulties: independent coins with an accuracy of their own."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    accuracies = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 0.8, 0.9, 1.0])
    drawn = draw(st.lists(accuracies, min_size=1, max_size=6))
    return [[generator.random() < accuracy for _ in range(N)] for accuracy in drawn]


def play(table, in_flight, order=None, before=()):
    """Draw until all is decided, responses coming back in any order; return the schedule, and what was drawn."""
    schedule = Schedule([str(i) for i in range(len(table))], Window(N))
    for problem, response in before:
        schedule.count(problem, response, table[int(problem)][response], 1)
    order = order or random.Random(0)
    out, drawn = [], []
    while schedule.done < schedule.total:
        new = schedule.next_keys(in_flight - len(out))
        out += new
        drawn += new
        assert 0 < len(out) <= in_flight, "open problems, and nothing in flight, or too much"
        for _ in range(order.randint(1, len(out))):
            problem, response = out.pop(order.randrange(len(out)))
            schedule.count(problem, response, table[int(problem)][response], 1)
    return schedule, drawn


@settings(max_examples=60)
@given(tables(), st.integers(1, 300), st.randoms(use_true_random=False), st.data())
def test_kept_set_is_that_of_all_responses(table, in_flight, order, data):
    """Whatever is known already, in part or in full, is not drawn again."""
    keys = [(str(problem), response) for problem in range(len(table)) for response in range(N)]
    before = data.draw(st.lists(st.sampled_from(keys), unique=True))
    by_definition = [str(i) for i, row in enumerate(table) if 8 <= sum(row) <= 32]
    schedule, drawn = play(table, in_flight, order=order, before=before)
    assert schedule.kept() == by_definition
    assert len({*drawn, *before}) == len(drawn) + len(before)


@settings(max_examples=30)
@given(tables())
def test_no_response_is_wasted_while_problems_outnumber_the_slots(table):
    """One slot: every response is drawn because a verdict needed it, so none could have been left out at its end."""
    schedule, drawn = play(table, in_flight=1)
    for problem, tally in schedule.tallies.items():
        last = [response for name, response in drawn if name == problem][-1]
        correct = tally.correct_count - tally.correct[last]
        assert Window(N).verdict(correct, tally.drawn - 1) is Verdict.OPEN


def test_first_wave_is_what_each_verdict_needs_at_least():
    """16 each. Only then, with slots to spare, one more each in turn."""
    schedule = Schedule(["a", "b"], Window(N))
    assert schedule.next_keys(32) == [(p, i) for p in "ab" for i in range(16)]
    assert schedule.next_keys(3) == [("a", 16), ("b", 16), ("a", 17)]


@pytest.mark.parametrize(("problem", "response"), [("b", 0), ("a", N), ("a", -1), ("a", 3)])
def test_what_cannot_be_counted_is_refused(problem, response):
    schedule = Schedule(["a"], Window(N))
    schedule.count("a", 3, True, 1)
    with pytest.raises(CheckpointStateError, match=f"response {response} to problem {problem}"):
        schedule.count(problem, response, True, 1)
