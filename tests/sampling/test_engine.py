"""Seeds that depend on nothing but problem and response, and how requests are spread over engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.errors import EnvironmentMismatchError
from verl_precision.sampling.engine import Request, response_seed
from verl_precision.sampling.ray_engines import engines_that_fit, spread


def test_every_response_has_a_seed_of_its_own():
    seeds = {response_seed(0, f"{problem:016x}", index) for problem in range(200) for index in range(40)}
    assert len(seeds) >= 7990  # of 8000; 2^31 values collide 0.015 times on average
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert response_seed(0, "a", 1) == response_seed(0, "a", 1) != response_seed(1, "a", 1)
    assert response_seed(0, "a", 11) != response_seed(0, "a1", 1)


@given(st.integers(0, 50), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_requests_go_where_least_is_in_flight(count, in_flight):
    requests = [Request(str(index), 0, (), 1, 0) for index in range(count)]
    shares = spread(requests, in_flight)
    assert sorted((r for share in shares for r in share), key=lambda r: int(r.problem)) == requests
    loads = [before + len(share) for before, share in zip(in_flight, shares, strict=True)]
    given_to = [load for load, share in zip(loads, shares, strict=True) if share]
    assert not given_to or max(given_to) <= min(loads) + 1


def test_engines_that_fit():
    assert engines_that_fit(8, 1, None) == 8
    assert engines_that_fit(8, 2, 3) == 3
    with pytest.raises(EnvironmentMismatchError, match="8 GPU.*Allowed: 1 to 8"):
        engines_that_fit(8, 1, 9)
    with pytest.raises(EnvironmentMismatchError, match="0 GPU"):
        engines_that_fit(0, 1, None)
