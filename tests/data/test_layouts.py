"""Each data set's own columns, as documented, to question and answer."""

import pytest

from verl_precision.data.layouts import DAPO_AFTER, DAPO_BEFORE, LAYOUTS, last_boxed
from verl_precision.data.stand_in import COUNT, stand_in_rows
from verl_precision.errors import ConfigurationError


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so $\\boxed{3}$.", "3"),
        ("first $\\boxed{1}$, then $\\boxed{\\frac{1}{\\sqrt{2}}}$", "\\frac{1}{\\sqrt{2}}"),
        ("it is $\\boxed{\\left\\{1, 2\\right\\}}$.", "\\left\\{1, 2\\right\\}"),
        ("which is $\\boxed 2$.", "2"),
        ("which is $\\fbox{7}$.", "7"),
    ],
)
def test_the_last_boxed_answer_with_balanced_braces(solution, answer):
    assert last_boxed(solution) == answer


@pytest.mark.parametrize("solution", ["no answer", "", "open \\boxed{\\frac{1}{2}"])
def test_a_solution_without_an_answer_is_an_error(solution):
    with pytest.raises(ConfigurationError, match="no .boxed answer"):
        last_boxed(solution)


def test_rows_as_the_hub_has_them():
    math = {"problem": "P?", "level": "Level 5", "type": "Algebra", "solution": "Thus $\\boxed{x^2}$."}
    assert LAYOUTS["math"].read(math).answer == "x^2"
    aime = {"ID": "2024-I-1", "Problem": "P?", "Solution": "S", "Answer": 25}
    assert LAYOUTS["aime"].read(aime).answer == "25"
    dapo = {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_BEFORE + "P?" + DAPO_AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    question = LAYOUTS["verl"].read(dapo)
    assert (question.text, question.answer, question.source) == ("P?", "34", "math_dapo")
    guru = {**dapo, "prompt": [{"content": "P? Please output the final answer within \\boxed{}.", "role": "user"}]}
    assert LAYOUTS["verl"].read(guru).text == "P?"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stand_ins_have_the_columns_and_right_answers(layout):
    rows = stand_in_rows(layout)
    assert len(rows) == COUNT
    for row in rows:
        assert set(row) >= set(LAYOUTS[layout].columns)
        question = LAYOUTS[layout].read(row)
        first, second = question.text.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(question.answer) == int(first) + int(second)
