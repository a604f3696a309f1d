"""The parts of a gap add up to it, token by token, whatever the steps are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from verl_precision.tools.gap.explain.attribution import attribute

LOG_PROBS = arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 20)), elements=st.floats(-30, 0))


@given(LOG_PROBS)
def test_parts_add_up(log_probs_KN):
    found = attribute(list(log_probs_KN))
    gap = log_probs_KN[-1] - log_probs_KN[0]
    assert sum(part.nats for part in found.parts) == pytest.approx(found.nats, abs=1e-9)
    assert found.nats == pytest.approx(np.abs(gap).mean())
    whole = np.mean([np.expm1(g) - g for g in gap])
    assert sum(part.k3 for part in found.parts) == pytest.approx(found.k3, rel=1e-6, abs=1e-12)
    assert found.k3 == pytest.approx(whole, rel=1e-6, abs=1e-9)
    assert found.tokens == len(gap) and found.left_out == 0


def test_by_hand():
    # g = (0.3, -0.1): steps (0.2, 0.1) and (0.1, -0.2)
    found = attribute([np.array([-1.0, -2.0]), np.array([-0.8, -1.9]), np.array([-0.7, -2.1])])
    first, second = found.parts
    assert (first.nats, second.nats) == pytest.approx(((0.2 - 0.1) / 2, (0.1 + 0.2) / 2))
    assert (first.size, second.size) == pytest.approx((0.15, 0.15))
    k3 = [np.expm1(g) - g for g in (0.3, -0.1)]
    assert first.k3 == pytest.approx((0.2 / 0.3 * k3[0] + 0.1 / -0.1 * k3[1]) / 2)
    assert found.share(first) + found.share(second) == pytest.approx(1)
    # Without a step, the other one is the gap.
    without = [np.mean([np.expm1(g) - g for g in other]) for other in ((0.1, -0.2), (0.2, 0.1))]
    assert (first.without, second.without) == pytest.approx(tuple(without))


def test_independent_steps_have_shares_of_the_variance():
    rng = np.random.default_rng(0)
    steps = rng.normal(0, [[1e-3], [2e-3]], (2, 200_000))
    found = attribute([np.zeros(200_000), steps[0], steps.sum(0)])
    assert [found.share(part) for part in found.parts] == pytest.approx([1 / 5, 4 / 5], abs=0.01)


def test_a_step_that_undoes_another_has_a_negative_part():
    found = attribute([np.zeros(3), np.full(3, 0.5), np.full(3, 0.1)])
    assert found.parts[1].nats == pytest.approx(-0.4) and found.parts[1].size == pytest.approx(0.4)


def test_tokens_that_are_not_finite_are_left_out_and_counted():
    found = attribute([np.array([-1.0, -1.0, -1.0]), np.array([-1.0, np.nan, -1.5]), np.array([-np.inf, -1.0, -1.5])])
    assert (found.tokens, found.left_out, found.nats) == (1, 2, 0.5)
    none = attribute([np.array([np.nan]), np.array([-1.0])])
    assert (none.tokens, none.left_out, none.nats, none.k3) == (0, 1, 0, 0)
    assert none.share(none.parts[0]) == 0


def test_no_gap():
    found = attribute([np.full(4, -1.0)] * 3)
    assert found.nats == found.k3 == 0 and all(found.share(part) == 0 for part in found.parts)
