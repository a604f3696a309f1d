"""The answer that a response gives, and the score that reasoning_gym's own scorers give it; odd text costs nothing."""

import ast
import inspect
import json
import math
from types import SimpleNamespace

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.tools.rewards import reasoning_gym_answer
from verl_precision.tools.rewards.reasoning_gym_answer import LONGEST, UNSAFE, answer_in, build, compute_score

factory = pytest.importorskip("reasoning_gym.factory", reason="of the extra `tasks`")
# Numbers, words, lists, grids, matrices, expressions, dates; exact scorers and those with partial scores.
TASKS = (
    *("products", "chain_sum", "gcd", "lcm", "power_function", "decimal_arithmetic", "complex_arithmetic", "coin_flip"),
    *("fraction_simplification", "time_intervals", "calendar_arithmetic", "polynomial_equations", "basic_arithmetic"),
    *("letter_jumble", "spell_backward", "word_sorting", "number_sorting", "knights_knaves", "rotate_matrix"),
    *("mini_sudoku", "tower_of_hanoi", "syllogism", "family_relationships", "rectangle_count", "group_anagrams"),
)
FORMS = ("Answer: {}", "I think.\n\n**Answer:** {}\n", "So:\n<answer>{}</answer> done", "Answer: 7.\nNo. Answer:\n{}")
ODD = (
    "", " ", "\0", "x" * 20_000, "9" * 5_000, "(" * 2_500, "[" * 5_000, "{" * 5_000, "\ud800", "\u202e½𝟙", "\n" * 50,
    "1/0", "0/0", "nan", "nanj", "717+nanj", "inf", "-inf", "Infinity", "1e999999999", "-1.5E+99_99", "1e400",
    "0x" + "f" * 99, "None", "null", "[]", '{"a": 717}', "{{}", "\\boxed{", "\\boxed{}", "<answer>", "</answer>",
    "Answer:", "1:2:3", "%s", "[[[717]]]", "move disk 717 from 717 to 717", "-1 days, 25:61", "717,,2",
    "__import__('os').abort()", "71**71**71**717",
)  # fmt: skip


@pytest.fixture(scope="module")
def entries():
    """Eight entries of each task."""
    return {task: [*build(task, 0, size=8, seed=5)] for task in TASKS}


def truth_of(task, entry):
    return json.dumps({"task": task, "level": 0, "entry": entry})


def test_extracted_answers_score_as_clean_ones(entries):
    """Its own answer, and that of another question, in every form; the scorer itself never saw a file or a response."""
    compared, partial = 0, 0
    for task in TASKS:
        scorer = build(task, 0, size=8, seed=5).score_answer
        for number, entry in enumerate(entries[task]):
            answer = entries[task][number - number % 2]["answer"]
            clean = scorer(answer, entry)
            form = FORMS[number % len(FORMS)]
            found = compute_score("", form.format(answer), truth_of(task, entry))
            assert found == {"score": clean, "acc": float(clean >= 1)}, (task, form, answer)
            compared, partial = compared + 1, partial + (0 < clean < 1)
    assert compared == 200 and partial > 10


@pytest.mark.parametrize(("response", "truth", "answer"), cases(__file__, "ANSWERS"))
def test_answer_in_a_response(response, truth, answer):
    assert answer_in(response, truth) == answer


@pytest.mark.parametrize("task", TASKS)
def test_odd_text_scores_from_0_to_1_and_never_right(entries, task):
    truth = truth_of(task, entries[task][0])
    for text in ODD:
        for response in (text, f"Answer: {text}", f"<answer>{text}</answer>"):
            found = compute_score("", response, truth)
            assert 0 <= found["score"] < 1 and found["acc"] == 0, (response[:40], found)


@given(st.text() | st.text(st.sampled_from("0123456789.,/-+eEnaif{}[]()\\ \n:<>answer"), max_size=60))
def test_any_text_is_scored(entries, text):
    for task in TASKS:
        score = compute_score("", text, truth_of(task, entries[task][1]))["score"]
        assert math.isfinite(score) and 0 <= score <= 1


def test_what_is_too_long_is_wrong_and_a_scorer_out_of_range_is_clipped(entries, monkeypatch):
    truth = truth_of("products", entries["products"][0])
    for value, score in ((2.0, 1.0), (-1.0, 0.0), (math.nan, 0.0), (0.5, 0.5)):
        tasks = SimpleNamespace(score_answer=lambda answer, entry, value=value: value)
        monkeypatch.setattr(reasoning_gym_answer, "_built", lambda task, level, tasks=tasks: tasks)
        assert compute_score("", "Answer: x", truth)["score"] == score
    assert compute_score("", "y" * (LONGEST + 1), truth)["score"] == 0


def code_runs(function):
    """Whether a function, as it is written, gives text to Python or to SymPy's parser, which evaluates it."""
    calls = [each.func for each in ast.walk(function) if isinstance(each, ast.Call)]
    names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
    return names & {"eval", "exec", "parse_expr", "sympify", "compile", "run", "Popen"}


def test_tasks_whose_scorers_run_code_are_all_refused():
    """A new release with another such scorer fails here. Two of those that match run no text of an answer."""
    found = set()
    for task, (kind, _) in factory.DATASETS.items():
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
        methods = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        reached, todo = set(), {"score_answer"} & methods.keys()
        while todo:
            name = todo.pop()
            reached.add(name)
            called = {each.attr for each in ast.walk(methods[name]) if isinstance(each, ast.Attribute)}
            todo |= (called & methods.keys()) - reached
        if any(code_runs(methods[name]) for name in reached):
            found.add(task)
    assert found - {"number_sorting"} == set(UNSAFE)  # number_sorting: eval of the file's own answer


@pytest.mark.parametrize("task", UNSAFE)
def test_such_a_task_is_refused_by_the_reward(task):
    with pytest.raises(ConfigurationError, match=f"task='{task}': its scorer runs the answer as Python"):
        compute_score("", "Answer: 1", truth_of(task, {"question": "", "answer": "1", "metadata": {}}))


def test_reasoning_gym_must_be_there(monkeypatch):
    monkeypatch.setattr(reasoning_gym_answer, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMismatchError, match="reasoning_gym.*pip install"):
        build("products", 0)
