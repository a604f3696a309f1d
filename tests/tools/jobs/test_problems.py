"""Data sets and prompts: read alike from both formats, refused by row and field before a model loads."""

import json
import re

import pytest
from pyarrow import Table, parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import read_data_set, read_prompts

CHAT = [{"role": "user", "content": "2+2="}]


def test_parquet_and_jsonl_are_the_same_problems(tmp_path, row, write_rows):
    rows = [row(1), row(2), row(1, extra_info={"index": 7, "split": "x"})]
    first = read_data_set(write_rows(tmp_path / "a.jsonl", rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    second = read_data_set(tmp_path / "a.parquet")
    assert first.problems == second.problems and first.digest == second.digest
    assert [(problem.row, problem.ground_truth) for problem in first.problems] == [(0, "2"), (1, "3")]
    assert first.duplicates == 1


def test_kept_rows_come_out_with_every_column_and_its_type_and_verl_reads_them(tmp_path, row):
    import datasets

    rows = [row(number, level=number) for number in range(4)]
    table = Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    data = read_data_set(tmp_path / "a.parquet")
    kept = tmp_path / "kept.parquet"
    data.write(kept, [data.problems[3].identifier, data.problems[1].identifier])
    assert parquet.read_table(kept).schema == table.schema
    assert parquet.read_table(kept).to_pylist() == [rows[1], rows[3]]
    read = datasets.load_dataset("parquet", data_files=str(kept), cache_dir=tmp_path / "cache")["train"]
    assert read[0]["prompt"] == rows[1]["prompt"] and read[0]["reward_model"]["ground_truth"] == "2"


@pytest.mark.parametrize(("changes", "words"), [
    ({"prompt": "What is 1 + 1?"}, "prompt is 'What is 1 + 1?'"),
    ({"prompt": []}, "prompt is []"),
    ({"prompt": [{"role": "user"}]}, "prompt is [{'role': 'user'"),
    ({"data_source": None}, "data_source is None"),
    ({"reward_model": {"style": "rule"}}, "reward_model is {'style': 'rule'"),
    ({"reward_model": None}, "reward_model is None"),
])  # fmt: skip
def test_a_field_that_is_missing_is_named_with_its_row(tmp_path, row, write_rows, changes, words):
    of_one_type = {name: value for name, value in changes.items() if name == "prompt"}  # a column has one type
    rows = [row(0, **of_one_type), row(1, **changes)]
    with pytest.raises(ConfigurationError, match=re.escape(f"row {0 if of_one_type else 1}: {words}")):
        read_data_set(write_rows(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_column_that_is_missing_is_named(tmp_path, row, write_rows, column):
    rows = [{key: value for key, value in row(1).items() if key != column}]
    with pytest.raises(ConfigurationError, match=f"no column '{column}'"):
        read_data_set(write_rows(tmp_path / "a.jsonl", rows))


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


@pytest.mark.parametrize(("read", "name", "content", "words"), [
    (read_data_set, "a.csv", "a,b", "unknown format '.csv'"),
    (read_data_set, "a.jsonl", '{"a": 1}\n{', "line 2: cannot be read as JSON"),
    (read_data_set, "a.jsonl", '{"a": "ü"}', "line 1: cannot be read as JSON"),  # in another encoding
    (read_data_set, "a.jsonl", "[1]\n[2]", "cannot be read"),
    (read_data_set, "a.parquet", "PAR", "cannot be read"),
    (read_data_set, "a.jsonl", "\n", "no rows"),
    (read_data_set, "typo.parquet", None, "no such file"),
    (read_prompts, "p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "row 1 has no field 'prompt' (it has: text)"),
    (read_prompts, "p.jsonl", '{"prompt": ""}', "field 'prompt' of row 0 is ''"),
    (read_prompts, "p.jsonl", '{"prompt": []}', "field 'prompt' of row 0 is '[]'"),
    (read_prompts, "p.jsonl", '{"prompt": [{"role": "user"}]}', "Allowed: text that is not empty, or a list"),
    (read_prompts, "p.jsonl", '{"prompt": 3}', "is '3'"),
    (read_prompts, "p.jsonl", '["a"]', "row 0 has no field 'prompt' (it has: list)"),
    (read_prompts, "p.jsonl", "\n", "the file has no rows"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_says_why(tmp_path, read, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read(tmp_path / name if read is read_data_set else str(tmp_path / name))
