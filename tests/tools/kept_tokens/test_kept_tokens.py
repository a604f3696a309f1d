"""The file of kept tokens: nothing is lost or altered, a torn record is none, a resume cuts, its size is bounded."""

import dataclasses
import os
import string
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_responses import GRPO, response

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.kept_tokens import kept_file as kept_tokens
from verl_precision.tools.kept_tokens.kept_file import (
    LONGEST_TEXT,
    KeptSummary,
    append,
    beside,
    cut_after,
    index_of,
    largest_step,
    record_of,
    response_at,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kept_tokens.bin"


def steps_in(path) -> list[int]:
    return [summary.step for summary in index_of(path)[0]]


def same(one, other) -> bool:
    """Whether two responses are equal, bit for bit, but for the offset."""
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            if mine.dtype != theirs.dtype or mine.tobytes() != theirs.tobytes():
                return False
        elif field.name != "offset" and mine != theirs and not (mine != mine and theirs != theirs):
            return False
    return True


FLOATS = st.floats(width=32)  # NaN, infinities and zeros of both signs among them
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=LONGEST_TEXT // 4)


@st.composite
def responses(draw):
    tokens = draw(st.integers(0, 40))
    arrays = ("rollout_log_probs", "log_probs", "shadow_log_probs", "advantages", "weights")
    found = {name: np.array(draw(st.lists(FLOATS, min_size=tokens, max_size=tokens)), "f4") for name in arrays}
    if draw(st.booleans()):
        found["shadow_log_probs"] = None
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)
    found["token_ids"] = np.array(draw(ids), "i4")
    found["reward"] = draw(st.none() | st.floats(allow_nan=False))
    found["version"] = draw(st.none() | st.integers(0, 2**40))
    found |= {name: draw(st.floats()) for name in ("log_weight", "largest_gap", "damage")}
    found["reason"] = draw(st.sampled_from(kept_tokens.REASONS))
    text = draw(st.booleans())
    if text:
        found["pieces"] = {token: draw(WORDS) for token in found["token_ids"].tolist()}
        found["prompt_text"] = draw(WORDS)
    identity = draw(st.text(string.ascii_letters + "_é", max_size=60))
    return response(draw(st.integers(0, 2**40)), tokens, text, identity=identity, **found)


@settings(max_examples=40, deadline=None)
@given(st.lists(responses(), max_size=4))
def test_everything_comes_back(tmp_path_factory, kept):
    path = tmp_path_factory.mktemp("run") / "kept_tokens.bin"
    assert append(path, kept) == path.stat().st_size
    summaries, end = index_of(path)
    assert end == path.stat().st_size and len(summaries) == len(kept)
    for summary, original in zip(summaries, kept, strict=True):
        again = response_at(path, summary.offset)
        assert same(again, original)
        assert same(KeptSummary(**{name: getattr(again, name) for name in vars(summary)}), summary)


def test_texts_are_those_of_the_tokens_and_long_ones_are_cut_at_whole_characters(path):
    ids = np.array([7, 3, 7], "i4")
    append(path, [response(tokens=3, token_ids=ids, pieces={3: "é" * 100, 7: "x"}, prompt_text="é" * 1000)])
    found = response_at(path, index_of(path)[0][0].offset)
    assert found.texts == ["x", "é" * 32, "x"]
    assert len(found.prompt_text.encode()) == LONGEST_TEXT * 3


def test_without_text_there_is_none(path):
    append(path, [response(text=False)])
    found = response_at(path, index_of(path)[0][0].offset)
    assert found.texts is found.prompt_text is None and len(found.token_ids) == 5


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("tokens", [1, 2000])
def test_no_step_is_larger_than_the_bound(text, shadow, tokens):
    """Of noise, with the longest texts and identity; and the bound is not idle."""
    ids = np.random.default_rng(1).permutation(2**20)[:tokens].astype("i4")
    random = np.random.default_rng(2)
    longest = ["".join(map(chr, random.integers(0x10000, 0x10FFFF, LONGEST_TEXT // 4))) for _ in range(tokens)]
    changes = {"identity": "i" * 300} | ({} if shadow else {"shadow_log_probs": None})
    if text:
        changes |= {"pieces": dict(zip(ids.tolist(), longest, strict=True)), "prompt_text": "".join(longest)[:48]}
    kept = [response(tokens=tokens, text=text, token_ids=ids, seed=seed, **changes) for seed in range(2)]
    size = sum(len(record_of(one)) for one in kept)
    most = largest_step(2, 3, tokens, text, GRPO.settings(), shadow)
    assert size <= most
    assert tokens == 1 or size > 0.75 * most


def test_a_torn_record_is_none_until_it_is_whole(path):
    append(path, [response(1), response(1, seed=1)])
    whole, end = path.read_bytes(), index_of(path)[0][1].offset
    for size in range(end, len(whole)):
        path.write_bytes(whole[:size])
        assert [one.offset for one in index_of(path)[0]] == [index_of(path)[0][0].offset], size
        assert index_of(path)[1] == end and index_of(path, end) == ([], end)
    with pytest.raises(ConfigurationError, match=f"no whole record begins at byte {end}"):
        response_at(path, end)
    path.write_bytes(whole)
    (later,), after = index_of(path, end)
    assert later.identity == "u1_0_0" and after == len(whole)


def test_a_resume_cuts_later_steps_and_what_is_torn_and_keeps_them_aside(path):
    for step in (1, 2, 3):
        append(path, [response(step), response(step, seed=1)])
    with path.open("ab") as file:
        file.write(record_of(response(4))[:50])
    cut_after(path, 2)
    aside = path.with_name("kept_tokens.bin.superseded")
    assert steps_in(path) == [1, 1, 2, 2] and steps_in(aside) == [3, 3]
    append(path, [response(3, seed=9)])
    assert steps_in(path) == [1, 1, 2, 2, 3] and index_of(path)[0][-1].identity == "u9_0_0"
    before = path.read_bytes()
    cut_after(path, 3)
    assert path.read_bytes() == before, "nothing is later"
    assert index_of(path, len(before) + 1) == ([], 0), "a reader that was further is told to begin anew"


def test_a_damaged_header_is_said_and_a_run_begins_a_new_file_beside_it(path):
    """Every bit at its begin, and a bit of every fourth byte, flipped: no reader raises another error, none is lost."""
    append(path, [response(1), response(2)])
    whole, begin = path.read_bytes(), index_of(path)[0][0].offset
    for bit in (*range(8 * 30), *range(8 * 30, 8 * begin, 33)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert steps_in(path) == [1, 2], "what is damaged says nothing about the records"
        except ConfigurationError as error:
            assert "header is damaged" in str(error) or "its version is" in str(error)
            with pytest.raises(ConfigurationError):
                response_at(path, begin)
            aside = cut_after(path, 1)
            assert aside.read_bytes() == damaged and not path.exists()
            aside.unlink()
        else:
            assert cut_after(path, 1) is None and steps_in(path) == [1]
        append(path, [response(5)])
        assert steps_in(path)[-1] == 5


@pytest.mark.parametrize("content", [
    b"", b"VPTOKENS", b"\0" * 4000, b"VPTOKENS\xff\xff\xff\xff" + b"[" * 9000, b'VPTOKENS\x10\0\0\0{"version": 222}',
])  # fmt: skip
def test_a_run_begins_beside_what_is_no_file_of_kept_tokens(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="kept_tokens.bin"):
        index_of(path)
    assert cut_after(path, 0).read_bytes() == content
    append(path, [response(1)])
    assert steps_in(path) == [1]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_and_left(path, make):
    make(path)
    for read in (index_of, lambda path: response_at(path, 0), lambda path: cut_after(path, 0)):
        with pytest.raises(ConfigurationError, match="kept_tokens.bin'?: it is no regular file"):
            read(path)
    assert os.path.lexists(path)


def test_a_record_of_no_length_ends_the_list(path):
    append(path, [response(1)])
    whole, begin = bytearray(path.read_bytes()), index_of(path)[0][0].offset
    size = kept_tokens._HEAD.size + whole[begin + kept_tokens._HEAD.size - 2]
    whole[begin + 4 : begin + 8] = bytes(4)
    whole[begin + size : begin + size + 4] = zlib.crc32(whole[begin : begin + size]).to_bytes(4, "little")
    path.write_bytes(whole)
    assert steps_in(path) == []


def test_a_run_from_scratch_keeps_the_former_one_aside(path):
    cut_after(path, 0)
    assert not path.exists()
    append(path, [response(1)])
    cut_after(path, 0)
    append(path, [response(1, seed=5)])
    assert [one.identity for one in index_of(path)[0]] == ["u5_0_0"]
    assert steps_in(path.with_name("kept_tokens.bin.superseded")) == [1]


def test_a_run_that_was_killed_in_the_header_is_begun_anew(path):
    append(path, [response(1)])
    path.write_bytes(path.read_bytes()[:20])
    cut_after(path, 0)
    append(path, [response(1)])
    assert steps_in(path) == [1]


def test_an_append_that_fails_leaves_the_file_as_it_was(path, monkeypatch):
    append(path, [response(1)])
    before = path.read_bytes()
    monkeypatch.setattr(kept_tokens, "record_of", lambda one: record_of(one) if one.step < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        append(path, [response(2), response(3)])
    assert path.read_bytes() == before


@pytest.mark.parametrize(("content", "message"), [
    (b"", "no file of kept tokens"),
    (b'{"step": 1}\n' * 9, "no file of kept tokens"),
    (b"VPTOKENS" + b"\x0e\0\0\0" + b'{"version": 9}', "its version is 9"),
])  # fmt: skip
def test_another_file_is_refused(path, content, message):
    path.write_bytes(content)
    for read in (index_of, lambda path: response_at(path, 12)):
        with pytest.raises(ConfigurationError, match=message):
            read(path)


def test_a_damaged_body_is_refused(path):
    append(path, [response(1)])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is damaged"):
        response_at(path, index_of(path)[0][0].offset)


def test_it_stands_beside_the_metrics(tmp_path):
    assert beside(tmp_path / "metrics.jsonl") == tmp_path / "kept_tokens.bin"
    assert beside(tmp_path / "run.jsonl") == tmp_path / "run.kept_tokens.bin"


def test_it_is_read_without_torch(run_python):
    done = run_python("import sys; import verl_precision.tools.kept_tokens.kept_file; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
