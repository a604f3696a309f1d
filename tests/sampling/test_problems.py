"""Data sets in verl's format: read alike from both formats, written without a change, refused by row and field."""

import pyarrow
import pytest
from pyarrow import parquet

from verl_precision.errors import ConfigurationError
from verl_precision.sampling.problems import read_data_set


def test_parquet_and_jsonl_are_the_same_problems(tmp_path, row, write_rows):
    rows = [row(number) for number in range(3)]
    first = read_data_set(write_rows(tmp_path / "a.jsonl", rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    second = read_data_set(tmp_path / "a.parquet")
    assert first.problems == second.problems
    assert first.digest == second.digest
    assert first.problems[1].ground_truth == "2"


def test_kept_rows_come_out_with_every_column_and_its_type(tmp_path, row):
    rows = [row(number, level=number) for number in range(4)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    data = read_data_set(tmp_path / "a.parquet")
    data.write(tmp_path / "kept.parquet", [data.problems[3].identifier, data.problems[1].identifier])
    kept = parquet.read_table(tmp_path / "kept.parquet")
    assert kept.schema == table.schema
    assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "kept.parquet"}
    assert kept.to_pylist() == [rows[1], rows[3]]


def test_verl_reads_what_is_written(tmp_path, row, write_rows):
    import datasets

    data = read_data_set(write_rows(tmp_path / "a.jsonl", [row(1), row(2)]))
    data.write(tmp_path / "kept.parquet", [data.problems[0].identifier])
    (read,) = datasets.load_dataset("parquet", data_files=str(tmp_path / "kept.parquet"), cache_dir=tmp_path)["train"]
    assert read["prompt"] == row(1)["prompt"]
    assert read["reward_model"]["ground_truth"] == "2"


def test_repeated_rows_are_one_problem(tmp_path, row, write_rows):
    rows = [row(1), row(2), row(1, extra_info={"index": 7, "split": "x"})]
    data = read_data_set(write_rows(tmp_path / "a.jsonl", rows))
    assert [problem.row for problem in data.problems] == [0, 1]
    assert data.duplicates == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "What is 1 + 1?"}, r"row 1: prompt is 'What is 1 \+ 1\?'"),
        ({"prompt": []}, r"row 1: prompt is \[\]"),
        ({"prompt": [{"role": "user"}]}, "row 1: prompt is {'role': 'user'"),
        ({"data_source": None}, "row 1: data_source is None"),
        ({"reward_model": {"style": "rule"}}, "row 1: reward_model.ground_truth is None"),
        ({"reward_model": None}, "row 1: reward_model is None"),
    ],
)
def test_a_field_that_is_missing_is_named_with_its_row(tmp_path, row, write_rows, changes, words):
    good = row(0, prompt=[] if isinstance(changes.get("prompt"), list) else row(0)["prompt"])
    if "prompt" in changes:  # a column has one type
        good["prompt"] = changes["prompt"]
        words = words.replace("row 1", "row 0")
    with pytest.raises(ConfigurationError, match=words):
        read_data_set(write_rows(tmp_path / "a.jsonl", [good, row(1, **changes)]))


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_column_that_is_missing_is_named(tmp_path, row, write_rows, column):
    rows = [{key: value for key, value in row(n).items() if key != column} for n in range(2)]
    with pytest.raises(ConfigurationError, match=f"no column '{column}'"):
        read_data_set(write_rows(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "a,b", "unknown format '.csv'"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.jsonl", "[1]\n[2]", "cannot be read"),
        ("a.parquet", "PAR", "cannot be read"),
        ("a.jsonl", "", "no rows"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        read_data_set(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_data_set(tmp_path / "typo.parquet")
