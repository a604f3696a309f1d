"""Seeds that depend on nothing but problem and response, and how requests are spread over engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.sanity_set.ray_source import engines_that_fit, spread
from verl_precision.sanity_set.source import RecordedSource, Request, response_seed


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


@pytest.mark.parametrize("line", [{"problem": "a"}, {"problem": "a", "response": 0, "tokens": 3, "correct": "yes"}])
def test_recorded_lines_that_are_not_responses_are_named(tmp_path, write_rows, line):
    with pytest.raises(ConfigurationError, match="line 1"):
        RecordedSource(write_rows(tmp_path / "r.jsonl", [line]))


def test_recorded_text_comes_without_a_verdict(tmp_path, write_rows):
    path = write_rows(tmp_path / "r.jsonl", [{"problem": "a", "response": 0, "tokens": 3, "text": "2"}])
    source = RecordedSource(path)
    source.submit([Request("a", 0, (), 1, 0)])
    (response,) = source.poll()
    assert (response.text, response.correct, response.tokens) == ("2", None, 3)
    assert source.poll() == []
