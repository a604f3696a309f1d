"""From files in each data set's columns to verl's format; what does not fit is refused."""

from contextlib import nullcontext
from unittest.mock import Mock

import pyarrow
import pytest
from cases import cases
from pyarrow import parquet

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.tools.data.catalog import CATALOG, TEMPLATES, last_boxed
from verl_precision.tools.data.prepare import prepare
from verl_precision.tools.jobs.problems import load_reward, read_data_set

MATH = "DigitalLearningGmbH/MATH-lighteval"
GURU = "P? Please output the final answer within \\boxed{}."
VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": TEMPLATES["dapo"]["user"].replace("{question}", "P?")}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
KIND = {"level": "Level 1", "type": "Algebra"}
MATH_ROWS = [{"problem": f"Problem {n}?", "solution": f"$\\boxed{{{n}}}$", **KIND} for n in range(5)]


@pytest.fixture
def write(tmp_path):
    """Prepare a data set from rows in its own columns; return what is said, and the rows written."""

    def run(name, rows, skip_size_check=True):
        source, target = tmp_path / "source.parquet", tmp_path / "out.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        said = prepare(name, target, source=source, skip_size_check=skip_size_check)
        return said, parquet.read_table(target).to_pylist()

    return run


@pytest.mark.parametrize(("solution", "answer"), [
    ("so $\\boxed{3}$.", "3"),
    ("first $\\boxed{1}$, then $\\boxed{\\frac{1}{\\sqrt{2}}}$", "\\frac{1}{\\sqrt{2}}"),
    ("it is $\\boxed{\\left\\{1, 2\\right\\}}$.", "\\left\\{1, 2\\right\\}"),
    ("which is $\\boxed 2$.", "2"),
    ("which is $\\fbox{7}$.", "7"),
    *((solution, None) for solution in ("no answer", "", "open \\boxed{\\frac{1}{2}")),
])  # fmt: skip
def test_the_last_boxed_answer_with_balanced_braces(solution, answer):
    with pytest.raises(ConfigurationError, match="no .boxed answer") if answer is None else nullcontext():
        assert last_boxed(solution) == answer


@pytest.mark.parametrize("name", CATALOG)
def test_stand_in_of_each_is_what_verl_and_its_reward_read(name, tmp_path):
    """verl's rule for math_dapo scores 1 and -1 in a mapping, the one for MATH 1 and 0."""
    path = tmp_path / f"{name}.parquet"
    assert "made-up sums, not the data set" in prepare(name, path, synthetic=True)
    data = read_data_set(path)
    assert len(data.problems) == 64
    assert data.problems[0].extra_info["origin"] == "stand-in"
    reward = load_reward("verl")
    assert reward.readable(data.problems) == data.problems
    for problem in data.problems[::30]:
        first, second = problem.prompt[-1]["content"].partition("What is ")[2].partition("?")[0].split(" + ")
        assert int(problem.ground_truth) == int(first) + int(second)
        assert reward.is_correct(problem, f"It is \\boxed{{{problem.ground_truth}}}.")
        assert not reward.is_correct(problem, "It is \\boxed{1}.")


def test_rows_by_hand_and_their_number(write, tmp_path):
    with pytest.raises(ConfigurationError, match="5 distinct problems in 5 rows; expected 7490 to 7500"):
        write("math", MATH_ROWS, skip_size_check=False)
    assert not (tmp_path / "out.parquet").exists()
    said, rows = write("math", MATH_ROWS)
    assert "5 distinct problems in 5 rows, template qwen_math; expected 7490 to 7500" in said
    system, user = rows[3]["prompt"]
    assert system["role"] == "system" and "\\boxed{}" in system["content"]
    assert user == {"role": "user", "content": "Problem 3?"}
    assert rows[3]["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert rows[3]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    rows = [{"ID": f"{n}", "Problem": f"P{n}?", "Solution": "", "Answer": n} for n in range(30)]
    said, written = write("aime_2024", rows, skip_size_check=False)
    assert "30 distinct problems" in said and "; expected" not in said
    assert written[25]["reward_model"]["ground_truth"] == "25"


@pytest.mark.parametrize(("name", "row", "answer", "source"), [
    ("aime_2025", {"problem": "P?", "answer": "070", "id": "0"}, "070", "math_dapo"),
    ("amc23", {"id": 0, "question": "P?", "answer": "27", "url": "u"}, "27", "math_dapo"),
    ("amc_2022_2023", {"id": 0, "problem": "P?", "answer": -1.0, "url": "u"}, "-1", "math_dapo"),
    ("math_500", {"problem": "P?", "solution": "s", "answer": "2.0x", "level": 1}, "2.0x", MATH),
    ("gsm8k", {"question": "P?", "answer": "#### is 1,000<<1>>.\n#### 1,000"}, "1000", MATH),
])  # fmt: skip
def test_sets_to_evaluate_on(write, name, row, answer, source):
    """Columns as on the hub; AMC's whole numbers are floats there, and GSM8K's answer ends a solution."""
    _, (written,) = write(name, [row])
    assert written["reward_model"]["ground_truth"] == answer and written["data_source"] == source
    assert "P?" in written["prompt"][-1]["content"]


def test_the_configuration_of_a_repository_is_asked_for_and_no_network_says_what_to_do(monkeypatch, tmp_path):
    load_dataset = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(EnvironmentMismatchError, match="openai/gsm8k cannot be downloaded.*--source FILE.*--synthetic"):
        prepare("gsm8k", tmp_path / "out.parquet")
    load_dataset.assert_called_once_with(path="openai/gsm8k", name="main", data_files=None, split="test")


def test_dapos_copies_of_each_problem_are_one(write):
    said, rows = write("dapo_math_17k", [VERL_ROW] * 100)
    assert "1 distinct problems in 100 rows" in said
    assert rows[0]["prompt"] == VERL_ROW["prompt"]  # its own template puts its own words back


def test_guru_gets_a_data_source_that_verl_knows(write, tmp_path):
    row = {**VERL_ROW, "data_source": "math__deepscaler_preview", "prompt": [{"role": "user", "content": GURU}]}
    _, (out,) = write("guru_math", [row])
    assert (out["data_source"], out["extra_info"]["source"]) == ("math_dapo", "math__deepscaler_preview")
    assert out["prompt"][0]["content"].startswith("Question: P?\n")
    assert load_reward("verl").is_correct(read_data_set(tmp_path / "out.parquet").problems[0], "\\boxed{34}")


@pytest.mark.parametrize(("name", "rows", "words"), [
    ("math", [{"question": "P?", "answer": "1"}], "its columns are answer, question. Allowed: problem, solution"),
    ("math", [{"problem": "P?", "solution": "no answer"}], "math, row 0: no .boxed answer"),
    ("math", [{"problem": "", "solution": "$\\boxed{1}$"}], "math, row 0: empty question or answer"),
    ("math", [{"problem": "P?", "solution": None}], "math, row 0"),
    ("math", [], "its columns are none"),
    ("amc23", [{"question": "P?", "answer": None}], "amc23, row 0: empty question or answer"),
    ("gsm8k", [{"question": "P?", "answer": "It is 72."}], "gsm8k, row 0: no #### in the solution 'It is 72.'"),
    ("guru_math", [{**VERL_ROW, "prompt": VERL_ROW["prompt"] * 2}], "2 user messages in prompt"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_named(write, name, rows, words):
    with pytest.raises(ConfigurationError, match=words):
        write(name, rows)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_hold_the_question_once_and_say_where_the_answer_goes(template):
    text = "".join(TEMPLATES[template].values())
    assert text.count("{question}") == 1 and [*TEMPLATES[template]][-1] == "user"
    assert "\\boxed{}" in text or "<answer>" in text or "Answer:" in text


@pytest.mark.parametrize(("arguments", "code", "words"), cases(__file__, "REFUSED"))
def test_command(tmp_path, typed, arguments, code, words):
    found, said = typed("data", *arguments, "--output", tmp_path)
    assert found == code and words in said
