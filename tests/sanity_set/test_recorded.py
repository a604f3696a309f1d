"""Recorded responses in place of an engine."""

import pytest

from verl_precision.errors import ConfigurationError
from verl_precision.sampling.engine import Request
from verl_precision.sanity_set.recorded import RecordedEngine


@pytest.mark.parametrize("line", [{"problem": "a"}, {"problem": "a", "response": 0, "tokens": 3, "correct": "yes"}])
def test_recorded_lines_that_are_not_responses_are_named(tmp_path, write_rows, line):
    with pytest.raises(ConfigurationError, match="line 1"):
        RecordedEngine(write_rows(tmp_path / "r.jsonl", [line]))


def test_recorded_text_comes_without_a_verdict(tmp_path, write_rows):
    path = write_rows(tmp_path / "r.jsonl", [{"problem": "a", "response": 0, "tokens": 3, "text": "2"}])
    engine = RecordedEngine(path)
    engine.submit([Request("a", 0, (), 1, 0)])
    (response,) = engine.poll()
    assert (response.text, response.correct, response.tokens) == ("2", None, 3)
    assert engine.poll() == []
