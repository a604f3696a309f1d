"""Data sets and prompts, read alike from both formats and refused by row and field; who is right by which reward."""

import json
import re

import pytest
from cases import cases
from pyarrow import Table, parquet

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.jobs.problems import Problem, load_reward, read_data_set, read_prompts

CHAT = [{"role": "user", "content": "2+2="}]


def test_parquet_and_jsonl_are_the_same_problems(tmp_path, row, write_rows):
    rows = [row(1), row(2), row(1, extra_info={"index": 7, "split": "x"})]
    first = read_data_set(write_rows(tmp_path / "a.jsonl", rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    second = read_data_set(tmp_path / "a.parquet")
    assert first.problems == second.problems and first.digest == second.digest
    assert [(problem.row, problem.ground_truth) for problem in first.problems] == [(0, "2"), (1, "3")]


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
    ({"data_source": ...}, "data_source is None"),  # no such column
])  # fmt: skip
def test_a_field_that_is_missing_is_named_with_its_row(tmp_path, row, write_rows, changes, words):
    of_one_type = {name: value for name, value in changes.items() if name == "prompt"}  # a column has one type
    rows = [row(0, **of_one_type), row(1, **changes)]
    if ... in changes.values():
        rows = [{key: value for key, value in each.items() if key not in changes} for each in rows]
    with pytest.raises(ConfigurationError, match=rf"row [01]: {re.escape(words)}"):
        read_data_set(write_rows(tmp_path / "a.jsonl", rows))


def test_prompts_of_verls_parquet_and_jsonl_read_the_same(tmp_path):
    rows = [{"prompt": CHAT, "ability": "math"}, {"prompt": [*CHAT, *CHAT], "ability": "math"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    for name in ("p.parquet", "p.jsonl"):
        assert read_prompts(str(tmp_path / name)) == [CHAT, [*CHAT, *CHAT]]
    assert read_prompts(str(tmp_path / "p.jsonl"), "ability", 1) == ["math"]
    assert len(read_prompts("built-in")) == 16


@pytest.mark.parametrize(("read", "name", "content", "words"), [
    (read_data_set, "a.csv", "a,b", "unknown format '.csv'"),
    (read_data_set, "a.jsonl", '{"a": 1}\n{', "line 2: "),
    (read_data_set, "a.jsonl", '{"a": "ü"}', "line 1: "),  # in another encoding
    (read_data_set, "a.jsonl", "[1]\n[2]", "cannot be read"),
    (read_data_set, "a.parquet", "PAR", "cannot be read"),
    (read_data_set, "a.jsonl", "\n", "no rows"),
    (read_data_set, "typo.parquet", None, "no such file"),
    (read_prompts, "p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "field 'prompt' of row 1 is 'None'"),
    (read_prompts, "p.jsonl", '{"prompt": [{"role": "user"}]}', "non-empty text"),
    (read_prompts, "p.jsonl", '{"prompt": 3}', "is '3'"),
    (read_prompts, "p.jsonl", '["a"]', "field 'prompt' of row 0 is 'None'"),
    (read_prompts, "p.jsonl", "\n", "the file has no rows"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_says_why(tmp_path, read, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read(tmp_path / name if read is read_data_set else str(tmp_path / name))


def problem(source: str = "math", truth: str = "2") -> Problem:
    return Problem("a", 0, [{"role": "user", "content": "What is 1 + 1?"}], source, truth, {"index": 1})


@pytest.mark.parametrize(("body", "pass_score", "correct"), cases(__file__, "REWARDS"))
def test_a_function_of_verls_signature(write_reward, body, pass_score, correct):
    assert load_reward(write_reward(body), pass_score).is_correct(problem(), "text") is correct


@pytest.mark.parametrize(("body", "words"), [
    *((f"return {no}", "Allowed: a finite number") for no in ("None", "float('nan')", "'yes'", "{'points': 1}")),
    ("return 1 / 0", "ZeroDivisionError.*on row 0"),
])  # fmt: skip
def test_a_function_that_gives_no_number_is_found_before_a_model_loads(write_reward, body, words):
    with pytest.raises(ConfigurationError, match=words):
        load_reward(write_reward(body)).readable([problem()])


def test_a_data_source_that_verl_does_not_know_is_named():
    with pytest.raises(ConfigurationError, match="data_source 'of_my_own'"):
        load_reward("verl").readable([problem("of_my_own")])


def test_empty_answers_are_counted_and_all_of_them_refused():
    reward, empty = load_reward("verl"), problem("math_dapo", " ")
    assert reward.readable([empty, problem("math_dapo")]) == [problem("math_dapo")]
    with pytest.raises(ConfigurationError, match="none of the 1 ground truths can be read"):
        reward.readable([empty])


@pytest.mark.parametrize(("name", "words"), cases(__file__, "FUNCTIONS"))
def test_rewards_that_do_not_exist(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("def other(): pass")
    (tmp_path / "broken.py").write_text("def compute_score(): return (")
    with pytest.raises(ConfigurationError, match=words):
        load_reward(name)


def test_math_verify_is_the_reward_of_the_recipes():
    pytest.importorskip("math_verify", reason="math-verify is optional")
    reward, half, blank = load_reward("math-verify"), problem(truth="\\frac{1}{2}"), problem(truth=" ")
    answers = {"\\boxed{0.5}": True, "\\boxed{0.4}": False, "0.5": False}
    assert {said: reward.is_correct(half, f"The answer is {said}.") for said in answers} == answers
    assert reward.readable([half, blank]) == [half]
