"""Who is right: verl's rule, math-verify's, or anyone's."""

import pytest

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.tools.jobs.problems import Problem
from verl_precision.tools.jobs.reward import load_reward
from verl_precision.tools.rewards import math_answers


def problem(source: str = "math", truth: str = "2") -> Problem:
    return Problem("a", 0, [{"role": "user", "content": "What is 1 + 1?"}], source, truth, {"index": 1})


@pytest.mark.parametrize("source", ["math_dapo", "DigitalLearningGmbH/MATH-lighteval"])
def test_verls_own_rules_agree_on_right_and_wrong(source):
    """math_dapo scores 1 and -1 in a mapping, the other 1 and 0."""
    reward = load_reward("verl")
    assert reward.is_correct(problem(source), "So it is \\boxed{2}.")
    assert not reward.is_correct(problem(source), "So it is \\boxed{3}.")


@pytest.mark.parametrize(("body", "pass_score", "correct"), [
    ("return 1.0", 1.0, True),
    ("return 0.99", 1.0, False),
    ("return 0.5", 0.5, True),
    ("return True", 1.0, True),
    ("return {'score': 1.0}", 1.0, True),
    ("return {'score': 1.0, 'acc': False}", 1.0, False),  # a bonus for form is no right answer
    ("return float(extra_info['index'] == 1 and data_source == 'math' and ground_truth == '2')", 1.0, True),
])  # fmt: skip
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


def test_another_function_is_another_setting(write_reward):
    first = load_reward(write_reward("return 1.0")).name
    assert load_reward(write_reward("return 0.0")).name != first
    assert first.startswith("reward.py:compute_score@")


@pytest.mark.parametrize(("name", "words"), [
    ("judge.py", "cannot be loaded .AttributeError: .*compute_score"),
    ("broken.py", "cannot be loaded .SyntaxError"),
    ("mathverify", "no such reward. Allowed: verl, math-verify, or FILE.py:FUNCTION"),
    ("nowhere.py:compute_score", "cannot be loaded .FileNotFoundError: .*nowhere.py"),
    ("pkg://verl_precision.rewrad", "cannot be loaded .ModuleNotFoundError: .*verl_precision.rewrad"),
    ("pkg://verl_precision.tools.rewards.answer_tag:OPEN", "OPEN is no function"),
])  # fmt: skip
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


def test_math_verify_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentMismatchError, match="pip install"):
        load_reward("math-verify")
