"""Prompts from a file or built in; what is no prompt is refused by name, before a model loads."""

import json
import re

import pytest
from pyarrow import Table, parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import read_prompts

CHAT = [{"role": "user", "content": "2+2="}]


def test_verls_parquet_and_jsonl_read_the_same(tmp_path):
    rows = [{"prompt": CHAT, "ability": "math"}, {"prompt": [*CHAT, *CHAT], "ability": "math"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    for name in ("p.parquet", "p.jsonl"):
        assert read_prompts(str(tmp_path / name)) == [CHAT, [*CHAT, *CHAT]]
    assert read_prompts(str(tmp_path / "p.jsonl"), "ability", 1) == ["math"]


def test_prompts_that_come_with_the_package_and_with_the_quickstart(root):
    built_in = read_prompts("built-in")
    assert len(built_in) == 16 and built_in[0][0]["content"].startswith("What is 17 times 23?")
    prompts = read_prompts(f"{root}/recipes/quickstart/prompts.jsonl", limit=3)
    assert prompts[0] == [{"role": "user", "content": "sum one"}] and len(prompts) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"question": "b"}', "row 1 has no field 'prompt' (it has: question)"),
        ('{"prompt": ""}', "field 'prompt' of row 0 is ''"),
        ('{"prompt": []}', "field 'prompt' of row 0 is '[]'"),
        ('{"prompt": [{"role": "user"}]}', "Allowed: text that is not empty, or a list"),
        ('{"prompt": 3}', "is '3'"),
        ('["a"]', "row 0 has no field 'prompt' (it has: list)"),
        ("\n", "the file has no rows"),
    ],
)
def test_a_file_that_is_not_prompts(tmp_path, content, words):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read_prompts(str(tmp_path / "p.jsonl"))
