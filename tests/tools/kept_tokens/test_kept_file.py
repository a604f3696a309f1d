"""The folder of kept tokens: nothing is lost or altered, damage is said, a resume cuts. See test_hostile_files.py."""

import math

import numpy as np
import pyarrow as pa
import pytest
from kept_responses import index_of, response
from pyarrow import parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.kept_tokens import kept_file
from verl_precision.tools.kept_tokens.kept_file import append, beside, cut_after, response_at


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kept_tokens"


def steps_in(path) -> list[int]:
    return [summary.step for summary in index_of(path)]


def bits(one) -> dict:
    """Return all of a response but its place, bit for bit."""
    values = {name: value for name, value in vars(one).items() if name != "offset"}
    return {name: (x.dtype, x.tobytes()) if isinstance(x, np.ndarray) else repr(x) for name, x in values.items()}


SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], "f4")


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_everything_comes_back(path, text, shadow):
    """Every bit of noise, numbers that are none, no tokens at all, and texts of any character."""
    changes = {} if shadow else {"shadow_log_probs": None}
    kept = [response(3, tokens, text, seed=tokens, **changes) for tokens in (0, 40, 1)]
    texts = ["", "\n", "é", "\U0010ffff", "\0"] if text else None
    special = {"log_probs": SPECIAL, "log_weight": math.nan, "damage": math.inf, "reward": None, "version": None}
    kept.append(response(2**40, 5, text, identity="u_é", texts=texts, **special, **changes))
    append(path, kept)
    summaries = index_of(path)
    assert len(summaries) == len(kept)
    for summary, original in zip(summaries, kept, strict=True):
        again = response_at(path, summary.offset)
        assert bits(again) == bits(original)
        assert bits(summary).items() <= bits(again).items()


def test_pandas_opens_all_steps_with_a_text_for_each_token(path):
    pandas = pytest.importorskip("pandas")
    append(path, [response(1, tokens=3, texts=["x", "three", "x"])])
    append(path, [response(2)])
    found = pandas.read_parquet(path)
    assert found.step.tolist() == [1, 2] and found.texts[0].tolist() == ["x", "three", "x"]


def test_a_resume_moves_later_steps_aside_and_a_run_from_scratch_all(path):
    cut_after(path, 0)
    assert not path.exists()
    for step in (1, 2, 3):
        append(path, [response(step), response(step, seed=1)])
    cut_after(path, 2)
    aside = path.with_name("kept_tokens.superseded")
    assert steps_in(path) == [1, 1, 2, 2] and len([*aside.iterdir()]) == 1
    append(path, [response(3, seed=9)])
    assert steps_in(path) == [1, 1, 2, 2, 3] and index_of(path)[-1].identity == "u9_0_0"
    cut_after(path, 3)
    assert steps_in(path) == [1, 1, 2, 2, 3], "nothing is later"
    cut_after(path, 0)
    assert steps_in(path) == [] and len(parquet.read_table(aside)) == 2 + 5, "what is superseded stays, twice as well"


def test_a_run_that_is_killed_while_it_writes_leaves_whole_steps(path, monkeypatch):
    append(path, [response(1)])
    monkeypatch.setattr(kept_file.parquet, "write_table", lambda table, file, **_: file.write_bytes(b"PAR1") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        append(path, [response(2)])
    (path / ".1234.step_2.parquet").write_bytes(b"PAR1")  # of a process that could not clean up
    assert steps_in(path) == [1] and len(parquet.read_table(path)) == 1


def test_a_damaged_file_is_refused_by_name_or_says_the_same(path):
    """Cut anywhere, and a bit of each part flipped: no reader raises another error, or shows another number."""
    append(path, [response(1), response(1, seed=1)])
    file = path / "step_1.parquet"
    whole, before = file.read_bytes(), [response_at(path, summary.offset) for summary in index_of(path)]
    damaged = [whole[:size] for size in range(0, len(whole), 97)]
    damaged += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 53)]
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            found = [response_at(path, summary.offset) for summary in index_of(path)]
        except ConfigurationError as error:
            assert str(file) in str(error)
            refused += 1
        else:
            assert [*map(bits, found)] == [*map(bits, before)]
    assert refused > 0.5 * len(damaged)


def test_what_is_no_table_of_kept_tokens_is_refused(path):
    path.mkdir()
    file = path / "step_1.parquet"
    footers = (b"PAR1" + b"\0" * 50 + b"\xff\xff\xff\x7fPAR1", b"PAR1" + bytes(range(100)) + b"\x60\0\0\0PAR1")
    for content in (*footers, b"", b"\0" * 4000, b"PAR1", b'{"step": 1}\n', bytes(range(256)) * 4):
        file.write_bytes(content)
        for read in (index_of, lambda path: response_at(path, 256)):
            with pytest.raises(ConfigurationError, match=r"step_1\.parquet"):
                read(path)
    for steps, words in (([1], "no column"), ([1] * 300, "300 responses")):
        parquet.write_table(pa.table({"step": steps}), file)
        with pytest.raises(ConfigurationError, match=words):
            index_of(path)


def test_a_file_in_the_place_of_the_folder_and_a_response_that_is_gone_are_refused(path):
    with pytest.raises(ConfigurationError, match="no response 256"):
        response_at(path, 256)
    path.touch()
    for read in (index_of, lambda path: cut_after(path, 0)):
        with pytest.raises(ConfigurationError, match="it is not a folder of kept tokens"):
            read(path)


def test_it_stands_beside_the_metrics(tmp_path):
    assert beside(tmp_path / "metrics.jsonl") == tmp_path / "kept_tokens"
    assert beside(tmp_path / "run.jsonl") == tmp_path / "run.kept_tokens"
