"""What is on disk after a kill, and what is refused."""

import pytest

from verl_precision.errors import CheckpointStateError, ConfigurationError
from verl_precision.sampling.journal import JOURNAL, open_journal

SETTINGS = {"model": "m", "seed": 0, "low": "1/5"}
FIRST, SECOND, THIRD = {"problem": "a", "value": 0.1}, {"problem": "a", "text": "text\nü"}, {"problem": "b"}
FIELDS = {"problem": str}


def written(folder):
    journal = open_journal(folder, SETTINGS)
    positions = [journal.append({**FIRST, "text": None}), journal.append(SECOND)]
    assert [journal.read(position) for position in reversed(positions)] == [SECOND, FIRST]
    assert journal.read(journal.append(THIRD)) == THIRD, "writing goes to the end, wherever was read"
    journal.close()
    return folder / JOURNAL


def records(folder):
    journal = open_journal(folder, SETTINGS)
    found = list(journal.records(FIELDS))
    assert [journal.read(position) for position, _ in found] == [record for _, record in found]
    journal.close()
    return [record for _, record in found], journal.torn


def test_comes_back_as_it_was(tmp_path):
    written(tmp_path / "new")
    assert records(tmp_path / "new") == ([FIRST, SECOND, THIRD], False)


def test_torn_anywhere_in_the_last_line_loses_only_that_line(tmp_path):
    """Cut at every byte: complete lines stay, and what is appended next starts a line of its own."""
    whole = written(tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    (tmp_path / "cut").mkdir()
    for cut in range(len(whole) + 1):
        (tmp_path / "cut" / JOURNAL).write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        found, torn = records(tmp_path / "cut")
        assert found == [FIRST, SECOND, THIRD][: max(complete - 1, 0)], cut
        assert torn == (cut not in (0, *ends))
        again = open_journal(tmp_path / "cut", SETTINGS)
        again.append({"problem": "c"})
        again.close()
        assert records(tmp_path / "cut")[0] == [*found, {"problem": "c"}]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    path = written(tmp_path)
    with path.open("a") as journal:
        journal.write("x" * (5 << 20))
    assert records(tmp_path) == ([FIRST, SECOND, THIRD], True)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"model": "other" * 100}, {"new": 1}])
def test_other_settings_are_refused_by_name(tmp_path, changed):
    path = written(tmp_path)
    before = path.read_bytes()
    (name,) = changed
    with pytest.raises(ConfigurationError, match=f"begun with other settings .{name}: .* there, .* now") as caught:
        open_journal(tmp_path, {**SETTINGS, **changed})
    assert path.read_bytes() == before
    assert len(str(caught.value)) < 600


def test_two_processes_cannot_write_one_journal(tmp_path):
    journal = open_journal(tmp_path, SETTINGS)
    with pytest.raises(ConfigurationError, match="another process is writing it"):
        open_journal(tmp_path, SETTINGS)
    journal.close()
    open_journal(tmp_path, SETTINGS).close()


@pytest.mark.parametrize("line", ["garbage", "[]", '{"value": 1}', '{"problem": 1}'])
def test_damage_before_the_last_line_is_refused(tmp_path, line):
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(CheckpointStateError, match="line 2"):
        records(tmp_path)


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / JOURNAL).write_text('{"a": 1}\n')
    with pytest.raises(CheckpointStateError, match="no settings"):
        open_journal(tmp_path, SETTINGS)
    assert (tmp_path / JOURNAL).read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("name", ["thesis.tex", "settings.json", "summary.json"])
def test_what_somebody_else_made_is_left_alone(tmp_path, name):
    """`settings.json` is in a folder of the former `mismatch`, whose samples had other seeds."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigurationError, match=rf"it has {name} and no journal.jsonl.*Nothing was written"):
        open_journal(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_with_none_of_the_outputs_will_do(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    open_journal(tmp_path, SETTINGS, outputs=["summary.json"]).close()
    assert (tmp_path / JOURNAL).is_file() and (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="Nothing was written"):
        open_journal(tmp_path / "file", SETTINGS)
