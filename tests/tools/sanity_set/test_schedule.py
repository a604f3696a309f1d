"""Early stopping changes nothing but the work: same kept set for any number in flight and any order of return."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.base.errors import CheckpointStateError
from verl_precision.tools.sanity_set.schedule import Schedule
from verl_precision.tools.sanity_set.window import Verdict, Window

N = 40


@st.composite
def tables(draw):
    """Problems of all difficulties: independent coins with an accuracy of their own."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    accuracies = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 0.8, 0.9, 1.0])
    drawn = draw(st.lists(accuracies, min_size=1, max_size=6))
    return [[generator.random() < accuracy for _ in range(N)] for accuracy in drawn]


def play(table, in_flight, early_stopping=True, order=None, before=()):
    """Draw until all is decided; responses come back in any order, some while others are out.

    Returns:
        The schedule, and what was drawn.
    """
    schedule = Schedule([str(i) for i in range(len(table))], Window(N), early_stopping)
    for problem, response in before:
        schedule.count(problem, response, table[int(problem)][response], 1)
    order = order or random.Random(0)
    out: list[tuple[str, int]] = []
    drawn: list[tuple[str, int]] = []
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
    everything, all_drawn = play(table, in_flight, early_stopping=False, order=order)
    assert everything.kept() == by_definition
    assert sorted(all_drawn) == sorted(keys)


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
