"""Early stopping changes nothing but the work: same kept set for any number in flight and any order of return."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_precision.errors import CheckpointStateError
from verl_precision.sanity_set.schedule import Schedule
from verl_precision.sanity_set.verdict import Verdict, Window

N = 40
TABLES = st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=1, max_size=6)


@st.composite
def tables(draw):
    """Problems of all difficulties: independent coins with an accuracy of their own."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    accuracies = draw(
        st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 0.8, 0.9, 1.0]), min_size=1, max_size=8)
    )
    return [[generator.random() < accuracy for _ in range(N)] for accuracy in accuracies]


def play(table, in_flight, early_stopping=True, order=None, before=()):
    """Draw until finished; responses come back in any order, some while others are out. Returns schedule and draws."""
    schedule = Schedule([str(i) for i in range(len(table))], Window(N), early_stopping)
    for problem, response in before:
        schedule.record(problem, response, table[int(problem)][response], 1)
    order = order or random.Random(0)
    out: list[tuple[str, int]] = []
    drawn: list[tuple[str, int]] = []
    while not schedule.finished:
        new = schedule.next_requests(in_flight - schedule.in_flight)
        out += new
        drawn += new
        assert len(out) == schedule.in_flight <= in_flight
        assert out, "open problems, and nothing in flight"
        for _ in range(order.randint(1, len(out))):
            problem, response = out.pop(order.randrange(len(out)))
            schedule.record(problem, response, table[int(problem)][response], 1)
    return schedule, drawn


def kept_by_definition(table):
    return [str(i) for i, row in enumerate(table) if 8 <= sum(row) <= 32]


@settings(deadline=None)
@given(tables() | TABLES, st.integers(1, 300), st.randoms(use_true_random=False))
def test_kept_set_is_that_of_all_responses(table, in_flight, order):
    schedule, drawn = play(table, in_flight, order=order)
    assert schedule.kept() == kept_by_definition(table)
    assert len(set(drawn)) == len(drawn) <= N * len(table)
    everything, all_drawn = play(table, in_flight, early_stopping=False, order=order)
    assert everything.kept() == schedule.kept()
    assert len(all_drawn) == N * len(table)


@settings(deadline=None)
@given(tables(), st.integers(1, 60), st.data())
def test_what_is_known_already_is_not_drawn_again(table, in_flight, data):
    pairs = [(str(i), j) for i in range(len(table)) for j in range(N)]
    before = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    schedule, drawn = play(table, in_flight, before=before)
    assert not set(drawn) & set(before)
    assert schedule.kept() == kept_by_definition(table)


@settings(deadline=None)
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
    assert schedule.next_requests(32) == [(p, i) for p in "ab" for i in range(16)]
    assert schedule.next_requests(3) == [("a", 16), ("b", 16), ("a", 17)]
    assert schedule.in_flight == 35


def test_coin_flips_need_16_responses_and_sure_things_33():
    flips, always, never = ([j % 2 == 0 for j in range(N)], [True] * N, [False] * N)
    schedule, drawn = play([flips, always, never], in_flight=1)
    assert schedule.kept() == ["0"]
    assert [tally.drawn for tally in schedule.tallies.values()] == [16, 33, 33]
    assert len(drawn) == 82


@pytest.mark.parametrize(("problem", "response"), [("b", 0), ("a", N), ("a", -1), ("a", 3)])
def test_what_cannot_be_counted_is_refused(problem, response):
    schedule = Schedule(["a"], Window(N))
    schedule.record("a", 3, True, 1)
    with pytest.raises(CheckpointStateError, match=f"response {response} to problem {problem}"):
        schedule.record(problem, response, True, 1)
