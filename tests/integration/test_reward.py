"""Who is right: verl's rule, math-verify's, or anyone's."""

import pytest

from verl_precision.errors import ConfigurationError
from verl_precision.integration.reward import load_reward
from verl_precision.sampling.problems import read_data_set


@pytest.fixture
def problem(tmp_path, row, write_rows):
    def build(**changes):
        return read_data_set(write_rows(tmp_path / "data.jsonl", [row(1, **changes)])).problems[0]

    return build


@pytest.fixture
def function(tmp_path):
    def write(body: str, name: str = "compute_score") -> str:
        path = tmp_path / "judge.py"
        path.write_text(f"def {name}(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
        return f"{path}:{name}"

    return write


@pytest.mark.parametrize("source", ["math_dapo", "DigitalLearningGmbH/MATH-lighteval"])
def test_verls_own_rules_agree_on_right_and_wrong(problem, source):
    """math_dapo scores 1 and -1 in a mapping, the other 1 and 0."""
    reward = load_reward("verl")
    assert reward.is_correct(problem(data_source=source), "So it is \\boxed{2}.")
    assert not reward.is_correct(problem(data_source=source), "So it is \\boxed{3}.")


@pytest.mark.parametrize(
    ("body", "correct"),
    [
        ("return 1.0", True),
        ("return 0.99", False),
        ("return True", True),
        ("return {'score': 1.0}", True),
        ("return {'score': 1.0, 'acc': False}", False),  # a bonus for form is no right answer
        ("return float(extra_info['index'] == 1 and data_source == 'math' and ground_truth == '2')", True),
    ],
)
def test_a_function_of_verls_signature(problem, function, body, correct):
    assert load_reward(function(body)).is_correct(problem(), "text") is correct


def test_correct_at_is_inclusive(problem, function):
    assert load_reward(function("return 0.5"), correct_at=0.5).is_correct(problem(), "")


@pytest.mark.parametrize("body", ["return None", "return float('nan')", "return 'yes'", "return {'points': 1}"])
def test_a_score_that_is_no_number_is_an_error(problem, function, body):
    with pytest.raises(ConfigurationError, match="Allowed: a finite number"):
        load_reward(function(body)).is_correct(problem(), "")


def test_a_function_that_fails_is_found_before_a_model_loads(problem, function):
    with pytest.raises(ConfigurationError, match="ZeroDivisionError.*on row 0"):
        load_reward(function("return 1 / 0")).unreadable([problem()])


def test_a_data_source_that_verl_does_not_know_is_named(problem):
    with pytest.raises(ConfigurationError, match="data_source 'of_my_own'"):
        load_reward("verl").unreadable([problem(data_source="of_my_own")])


def test_empty_answers_are_counted_and_all_of_them_refused(problem):
    reward = load_reward("verl")
    math = [problem(data_source="math_dapo", reward_model={"ground_truth": t}) for t in (" ", "2")]
    assert reward.unreadable(math) == math[:1]
    with pytest.raises(ConfigurationError, match="none of the 1 ground truths can be read"):
        reward.unreadable(math[:1])


def test_another_function_is_another_setting(function):
    first = load_reward(function("return 1.0")).name
    assert load_reward(function("return 0.0")).name != first
    assert first.startswith("judge.py:compute_score@")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mathverify", "no such reward. Allowed: verl, math-verify, or FILE.py:FUNCTION"),
        ("nowhere.py:compute_score", "no file nowhere.py"),
    ],
)
def test_rewards_that_do_not_exist(name, words):
    with pytest.raises(ConfigurationError, match=words):
        load_reward(name)


def test_a_file_without_the_function_or_with_a_fault(function):
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_reward(function("return 1.0", name="other").replace(":other", ":compute_score"))
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load_reward(function("return ("))


def test_math_verify_knows_that_a_half_is_a_half(problem):
    pytest.importorskip("math_verify", reason="math-verify is optional")
    reward = load_reward("math-verify")
    half = problem(reward_model={"ground_truth": "\\frac{1}{2}"})
    assert reward.is_correct(half, "The answer is \\boxed{0.5}.")
    assert not reward.is_correct(half, "The answer is \\boxed{0.4}.")
    assert not reward.is_correct(half, "I do not know.")
    unparsed = problem(reward_model={"ground_truth": " "})
    assert reward.unreadable([half, unparsed]) == [unparsed]


def test_math_verify_that_is_not_installed_says_how_to_get_it(monkeypatch):
    from verl_precision.integration import reward

    monkeypatch.setattr(reward, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install"):
        load_reward("math-verify")
