"""Small files are read back as they were written, or refused with file, problem and remedy; nothing raw comes out."""

import json
import os
from dataclasses import dataclass

import pytest
from rubbish import FOREIGN, cut, flipped

from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.state import checked, read_state, require_fields

REMEDY = "Restore it."


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_rubbish_is_refused_by_name_with_a_reason_and_the_remedy(tmp_path, suffix, content):
    path = tmp_path / f"state{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointStateError) as refused:
        read_state(path, lambda state: checked(dict[str, float], state), REMEDY)
    assert str(path) in str(refused.value) and REMEDY in str(refused.value)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path),
                                  lambda path: os.symlink("nowhere", path)])  # fmt: skip
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "state.json")
    with pytest.raises(CheckpointStateError, match=r"state\.json cannot be read"):
        read_state(tmp_path / "state.json", dict, REMEDY)


@pytest.mark.parametrize("name", ["state.json", "no folder/state.json", "file/state.json"])
def test_no_file_is_no_state(tmp_path, name):
    (tmp_path / "file").touch()
    assert read_state(tmp_path / name, dict, REMEDY) is None


def test_a_file_cut_short_or_with_another_bit_is_what_it_was_or_refused(tmp_path):
    path, state = tmp_path / "state.json", {"a": 1.5, "b": 2.0}
    for content in (*cut(json.dumps(state).encode()), *flipped(json.dumps(state).encode())):
        path.write_bytes(content)
        try:
            found = read_state(path, lambda read: checked(dict[str, float], read), REMEDY)
        except CheckpointStateError:
            continue
        assert set(map(type, found.values())) == {float}, content


@dataclass
class Inner:
    steps: list[int | None]


@dataclass
class Outer:
    share: float
    inner: Inner
    since: int | None


GOOD = {"share": 1, "inner": {"steps": [1, None]}, "since": None}


@pytest.mark.parametrize("change", [
    {"share": float("nan")}, {"share": float("inf")}, {"share": "1"}, {"share": True}, {"share": 10**400},
    {"since": 1.0}, {"since": "1"}, {"inner": {"steps": [1.5]}}, {"inner": {"steps": None}}, {"inner": {"more": 1}},
    {"more": 1},
])  # fmt: skip
def test_each_value_has_the_type_of_its_field_and_another_is_refused(change):
    require_fields(Outer, GOOD)
    with pytest.raises((ValueError, LookupError)):
        require_fields(Outer, GOOD | change)
