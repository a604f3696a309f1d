"""What is on disk after a kill, and what is refused."""

import json

import pytest

from verl_precision.errors import CheckpointStateError, ConfigurationError
from verl_precision.sanity_set.journal import Sample, open_journal

SETTINGS = {"model": "m", "seed": 0, "low": "1/5"}
FIRST, SECOND = Sample("a", 0, True, 5), Sample("a", 1, False, 7, "text\nü")


def written(path):
    journal = open_journal(path, SETTINGS)
    journal.append(FIRST)
    journal.append(SECOND)
    journal.close()
    return path


def samples(path):
    journal = open_journal(path, SETTINGS)
    journal.close()
    return journal.samples, journal.torn


def test_comes_back_as_it_was(tmp_path):
    assert samples(written(tmp_path / "new" / "journal.jsonl")) == ([FIRST, SECOND], False)


def test_torn_anywhere_in_the_last_line_loses_only_that_line(tmp_path):
    """Cut at every byte: complete lines stay, and what is appended next starts a line of its own."""
    whole = written(tmp_path / "whole.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        found, torn = samples(path)
        assert found == [FIRST, SECOND][: max(complete - 1, 0)], cut
        assert torn == (cut not in (0, *ends))
        again = open_journal(path, SETTINGS)
        again.append(Sample("b", 0, True, 1))
        again.close()
        assert samples(path)[0] == [*found, Sample("b", 0, True, 1)]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"model": "other"}, {"new": 1}])
def test_other_settings_are_refused_by_name(tmp_path, changed):
    path = written(tmp_path / "journal.jsonl")
    before = path.read_bytes()
    (name,) = changed
    with pytest.raises(ConfigurationError, match=f"begun with other settings .{name}: .* there, .* now"):
        open_journal(path, {**SETTINGS, **changed})
    assert path.read_bytes() == before


def test_two_processes_cannot_write_one_journal(tmp_path):
    journal = open_journal(tmp_path / "journal.jsonl", SETTINGS)
    with pytest.raises(ConfigurationError, match="another process is writing it"):
        open_journal(tmp_path / "journal.jsonl", SETTINGS)
    journal.close()
    open_journal(tmp_path / "journal.jsonl", SETTINGS).close()


@pytest.mark.parametrize(
    "line",
    ["garbage", "[]", '{"problem": "a"}', json.dumps({"problem": "a", "response": 1, "correct": 1, "tokens": 1})],
)
def test_damage_before_the_last_line_is_refused(tmp_path, line):
    path = written(tmp_path / "journal.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(CheckpointStateError, match="line 2"):
        open_journal(path, SETTINGS)


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(CheckpointStateError, match="no settings"):
        open_journal(path, SETTINGS)
    assert path.read_text() == '{"a": 1}\n'
