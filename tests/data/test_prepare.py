"""From files in each data set's columns to verl's format; what does not fit is refused."""

import json

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from verl_precision.cli import app
from verl_precision.data.catalog import CATALOG
from verl_precision.data.layouts import DAPO_AFTER, DAPO_BEFORE
from verl_precision.data.prepare import prepare
from verl_precision.data.templates import TEMPLATES
from verl_precision.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.integration.reward import load_reward
from verl_precision.sampling.problems import read_data_set

MATH_ROWS = [
    {"problem": f"Problem {n}?", "level": "Level 1", "type": "Algebra", "solution": f"$\\boxed{{{n}}}$"}
    for n in range(5)
]


@pytest.fixture
def source(tmp_path):
    def write(rows):
        path = tmp_path / "source.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    return write


@pytest.mark.parametrize("name", CATALOG)
def test_stand_in_of_each_is_what_verl_and_its_reward_read(name, tmp_path):
    path = tmp_path / f"{name}.parquet"
    assert "a stand-in, not the data set" in prepare(name, path, stand_in=True)
    data = read_data_set(path)
    assert len(data.problems) == 64
    assert data.problems[0].extra_info["origin"] == "stand-in"
    reward = load_reward("verl")
    assert reward.unreadable(data.problems) == []
    for problem in data.problems[:3]:
        assert reward.is_correct(problem, f"It is \\boxed{{{problem.ground_truth}}}.")
        assert not reward.is_correct(problem, "It is \\boxed{1}.")


def test_rows_by_hand(source, tmp_path):
    written = prepare("math", tmp_path / "out.parquet", source=source(MATH_ROWS), any_count=True)
    assert "5 distinct problems in 5 rows, template qwen_math; expected 7490 to 7500" in written
    row = parquet.read_table(tmp_path / "out.parquet").to_pylist()[3]
    assert row["prompt"][0]["role"] == "system" and "\\boxed{}" in row["prompt"][0]["content"]
    assert row["prompt"][1] == {"role": "user", "content": "Problem 3?"}
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_another_number_of_problems_is_refused_with_both_numbers(source, tmp_path):
    with pytest.raises(ConfigurationError, match="5 distinct problems in 5 rows; expected 7490 to 7500"):
        prepare("math", tmp_path / "out.parquet", source=source(MATH_ROWS))
    assert not (tmp_path / "out.parquet").exists()


def test_the_expected_number_is_written_without_a_word(source, tmp_path):
    rows = [{"ID": f"{n}", "Problem": f"P{n}?", "Solution": "", "Answer": n} for n in range(30)]
    written = prepare("aime_2024", tmp_path / "out.parquet", source=source(rows))
    assert "30 distinct problems" in written and "; expected" not in written


def test_dapos_copies_of_each_problem_are_one(source, tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{DAPO_BEFORE}P?{DAPO_AFTER}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "a"},
    }
    written = prepare("dapo_math_17k", tmp_path / "out.parquet", source=source([row] * 100), any_count=True)
    assert "1 distinct problems in 100 rows" in written
    (out,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert out["prompt"] == row["prompt"]  # its own template puts its own words back


def test_guru_gets_a_data_source_that_verl_knows(source, tmp_path):
    """verl's default_compute_score raises NotImplementedError on Guru's own names."""
    row = {
        "data_source": "math__deepscaler_preview",
        "prompt": [{"role": "user", "content": "P? Please output the final answer within \\boxed{}."}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    prepare("guru_math", tmp_path / "out.parquet", source=source([row]), any_count=True)
    (out,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (out["data_source"], out["extra_info"]["source"]) == ("math_dapo", "math__deepscaler_preview")
    assert load_reward("verl").is_correct(read_data_set(tmp_path / "out.parquet").problems[0], "\\boxed{34}")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "P?", "answer": "1"}], "its columns are answer, question. Allowed: problem, solution"),
        ([{"problem": "P?", "solution": "no answer"}], "math, row 0: no .boxed answer"),
        ([{"problem": "", "solution": "$\\boxed{1}$"}], "math, row 0: empty question or answer"),
        ([{"problem": "P?", "solution": None}], "math, row 0"),
    ],
)
def test_rows_that_do_not_fit_are_named(source, tmp_path, rows, words):
    with pytest.raises(ConfigurationError, match=words):
        prepare("math", tmp_path / "out.parquet", source=source(rows), any_count=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_hold_the_question_once_and_say_where_the_answer_goes(template):
    messages = TEMPLATES[template]("What is {x}?")
    text = "".join(message["content"] for message in messages)
    assert text.count("What is {x}?") == 1
    assert "\\boxed{}" in text or "<answer>" in text or "Answer:" in text
    assert messages[-1]["role"] == "user"


def test_octothinkers_answers_are_read_by_a_reward_of_their_own(tmp_path):
    prepare("math", tmp_path / "out.parquet", template="octothinker", stand_in=True)
    problem = read_data_set(tmp_path / "out.parquet").problems[0]
    reward = load_reward("pkg://verl_precision.integration.answer_tag")
    right = problem.ground_truth
    assert reward.is_correct(problem, f"thought </think> <answer> {right} </answer>")
    assert reward.is_correct(problem, f"<answer>1</answer> no: <answer>\\boxed{{{right}}}</answer>")
    for wrong in (f"{right}", f"<answer>{right}", f"{right}</answer>", "<answer>1</answer>", ""):
        assert not reward.is_correct(problem, wrong)


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentMismatchError, match="--source FILE.*or --stand-in"):
        prepare("aime_2024", tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mth"], "error: data mth: no such data set. Allowed: sanity, sanity_r1d, math"),
        (["math", "--template", "qwen"], "error: --template qwen: no such template. Allowed: r1_distill, qwen_math"),
        (["math", "--source", "nowhere.parquet"], "error: --source nowhere.parquet: no such file"),
        (["math", "--source", "x", "--stand-in"], "Give one of them"),
    ],
)
def test_command_refuses_in_one_line(tmp_path, arguments, words):
    result = CliRunner().invoke(app, ["data", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_command_writes(tmp_path):
    result = CliRunner().invoke(app, ["data", "sanity", "--stand-in", "--output", str(tmp_path)])
    assert result.exit_code == 0 and "64 distinct problems" in result.output
    assert json.loads(json.dumps(parquet.read_table(tmp_path / "sanity.parquet").to_pylist()[0]))["ability"] == "math"
