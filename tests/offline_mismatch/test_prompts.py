"""Prompts from files as verl has them; a file that is not what it should be is refused by row."""

import json
import re

import pytest
from pyarrow import Table, parquet

from verl_precision.errors import ConfigurationError
from verl_precision.offline_mismatch.prompts import BUILT_IN, read_prompts

CHAT = [{"role": "user", "content": "2+2="}]


def test_verls_parquet_and_jsonl_read_the_same(tmp_path):
    rows = [{"prompt": CHAT, "ability": "math"}, {"prompt": [*CHAT, *CHAT], "ability": "math"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    expected = [CHAT, [*CHAT, *CHAT]]
    assert read_prompts(tmp_path / "p.parquet", "prompt", None) == expected
    assert read_prompts(tmp_path / "p.jsonl", "prompt", None) == expected
    assert read_prompts(tmp_path / "p.jsonl", "ability", 1) == ["math"]


def test_the_quickstarts_prompts_are_readable(root):
    prompts = read_prompts(root / "recipes" / "quickstart" / "prompts.jsonl", "prompt", 3)
    assert prompts[0] == [{"role": "user", "content": "sum one"}] and len(prompts) == 3


def test_built_in_prompts():
    assert [p[0]["content"] for p in read_prompts(None, "prompt", 2)] == list(BUILT_IN[:2])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"question": "b"}', "row 1 has no field 'prompt' (it has: question)"),
        ("p.jsonl", '{"prompt": ""}', "field 'prompt' of row 0 is ''"),
        ("p.jsonl", '{"prompt": []}', "field 'prompt' of row 0 is '[]'"),
        ("p.jsonl", '{"prompt": [{"role": "user"}]}', "Allowed: text that is not empty, or a list"),
        ("p.jsonl", '{"prompt": 3}', "is '3'"),
        ("p.jsonl", '["a"]', "row 0 has no field 'prompt' (it has: list)"),
        ("p.jsonl", '{"prompt": "a"}\n{oops', "line 2: cannot be read as JSON"),
        ("p.jsonl", "\n", "the file has no rows"),
        ("p.parquet", "text", "cannot be read"),
        ("p.csv", "prompt\na", "unknown format '.csv'"),
    ],
)
def test_a_file_that_is_not_prompts(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read_prompts(tmp_path / name, "prompt", None)


def test_no_file(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_prompts(tmp_path / "p.jsonl", "prompt", None)
