"""Files with the same content have one digest, wherever they lie; a change is seen, in a large file by a sample."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.base import content
from verl_precision.base.content import content_digest, weight_files


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("content")


def digest(place, *texts):
    files = [place / str(number) for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    return content_digest(files)


@given(one=st.lists(st.binary(max_size=9), max_size=3), other=st.lists(st.binary(max_size=9), max_size=3))
def test_small_files_have_one_digest_exactly_if_they_are_equal(place, one, other):
    assert (digest(place, *one) == digest(place, *other)) == (one == other)


def test_a_large_file_is_read_in_blocks_and_known_by_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "BLOCK", 4)
    size, blocks = 40_000, content.MOST
    first = digest(tmp_path, bytes(size))
    step = (size - 4) // (blocks - 1)
    for place, seen in ((0, True), (size - 1, True), (step + 1, True), (step + 9, False)):
        text = bytearray(size)
        text[place] = 1
        assert (digest(tmp_path, bytes(text)) != first) == seen, place
    assert digest(tmp_path, bytes(size + 1)) != first


def test_weights_are_config_index_and_shards_or_nothing_while_one_is_missing(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "2", "b": "1", "c": "2"}}))
    for name in ("config.json", "1", "README.md", "pytorch_model.bin"):
        (tmp_path / name).write_text(name)
    assert weight_files(tmp_path) is None
    (tmp_path / "2").write_text("2")
    names = ["config.json", "model.safetensors.index.json", "1", "2"]
    assert weight_files(tmp_path) == [tmp_path / name for name in names]
    (tmp_path / "model.safetensors.index.json").unlink()
    assert weight_files(tmp_path) == [tmp_path / "config.json", tmp_path / "pytorch_model.bin"]
