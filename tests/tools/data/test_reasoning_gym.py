"""Tasks of reasoning_gym as verl's data sets: what is written, again from the same seed, and what is refused."""

import json

import pytest
from cases import cases
from pyarrow import parquet

from verl_precision.tools.data.reasoning_gym import INSTRUCTIONS
from verl_precision.tools.jobs.problems import load_reward, read_data_set

pytest.importorskip("reasoning_gym", reason="of the extra `tasks`")


@pytest.fixture
def write(typed, tmp_path):
    """Write some tasks to a folder; return exit code, output, and the rows."""

    def run(folder, *words):
        code, said = typed("data", "reasoning_gym", "--output", tmp_path / folder, *words)
        path = tmp_path / folder / "reasoning_gym.parquet"
        return code, said, parquet.read_table(path).to_pylist() if path.exists() else None

    return run


def test_rows_are_verls_and_the_reward_reads_them(write, tmp_path):
    code, said, rows = write("a", "--task", "products", "--task", "word_sorting", "--level", 1, "--size", 20)
    assert code == 0 and "questions of products, word_sorting at level 1, seed 0" in said
    assert {row["data_source"] for row in rows} == {"reasoning_gym/products", "reasoning_gym/word_sorting"}
    assert [row["extra_info"]["index"] for row in rows] == [*range(len(rows))]
    about = {"index": 0, "level": 1, "seed": 0, "task": "products", "origin": "reasoning_gym 0.1.25"}
    assert rows[0]["extra_info"] | {"index": 0} == about
    reward = load_reward("pkg://verl_precision.tools.rewards.reasoning_gym_answer")
    problems = read_data_set(tmp_path / "a" / "reasoning_gym.parquet").problems
    assert len(problems) == len(rows)
    for problem in problems:
        entry = json.loads(problem.ground_truth)["entry"]
        system, user = {"role": "system", "content": INSTRUCTIONS[0]}, {"role": "user", "content": entry["question"]}
        assert problem.prompt == [system, user]
        assert reward.is_correct(problem, f"I think so.\nAnswer: {entry['answer']}")
        assert not reward.is_correct(problem, "Answer: 7.77")


def test_a_seed_gives_the_same_questions_and_another_seed_others(write):
    words = ("--task", "chain_sum", "--level", 2, "--size", 40)
    first, again, other = (write(name, *words, "--seed", seed)[2] for name, seed in (("a", 7), ("b", 7), ("c", 8)))
    assert first == again
    questions, others = ({row["prompt"][-1]["content"] for row in rows} for rows in (first, other))
    assert len(questions) == len(others) == 40 and not questions & others, "seeds i and i + 1 share questions there"
    harder = write("d", *words[:2], "--level", 6, "--size", 40, "--seed", 7)[2]
    assert max(len(row["prompt"][-1]["content"]) for row in harder) > max(map(len, questions))


def test_several_levels_and_answers_of_several_lines(write):
    words = ("--task", "chain_sum", "--size", 10, "--seed", 3)
    _, said, rows = write("a", *words, "--level", 0, "--level", 2)
    assert "questions of chain_sum at level 0, 2, seed 3" in said
    alone = [row for at, level in enumerate((0, 2)) for row in write(f"alone_{at}", *words, "--level", level)[2]]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in alone]
    assert {row["extra_info"]["level"] for row in rows} == {0, 2}
    grids = write("b", "--task", "rotate_matrix", "--size", 3)[2]
    assert {row["prompt"][0]["content"] for row in grids} == {INSTRUCTIONS[1]}, "a grid is no line"


def test_repeated_questions_are_left_out_and_said(write):
    _, said, rows = write("a", "--task", "coin_flip", "--size", 50)
    assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows) < 50
    assert f"{len(rows)} questions of coin_flip" in said and f"{50 - len(rows)} repeated ones were left out" in said


def test_a_file_is_never_replaced(write):
    words = ("a", "--task", "gcd", "--size", 5)
    rows = write(*words)[2]
    code, said, found = write(*words)
    assert code == 0 and "has these questions already" in said and found == rows
    code, said, found = write(*words, "--seed", 1)
    assert code == 1 and "another data set" in said and found == rows


@pytest.mark.parametrize(("words", "code", "problem"), cases(__file__, "REFUSED"))
def test_refused_before_a_file_is_written(write, words, code, problem):
    found, said, rows = write("a", *words.split())
    assert found == code and problem in " ".join(said.replace("│", " ").split()) and rows is None
