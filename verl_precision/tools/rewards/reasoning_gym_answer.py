r"""Reward for the tasks of reasoning_gym: finds the answer in the response, and calls the task's own scorer.

In a recipe, for the data that `verl-precision data reasoning_gym` writes:

    reward:
      custom_reward_function:
        path: pkg://verl_precision.tools.rewards.reasoning_gym_answer
        name: compute_score
"""

import functools
import json
import re
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.tools.rewards.math_answers import braced_box

INSTALL = "Install it on every node: pip install reasoning-gym==0.1.25."
# The scorers of these tasks run the answer as Python: by eval(), or by SymPy's parse_expr(), which calls eval().
UNSAFE = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)
LONGEST = 5_000  # characters of an answer; the cost of some scorers grows with their square
# Fraction("1e999999999") would fill the memory. The distance of NaN from a complex number is NaN, and min(1, nan) is 1.
_NO_VALUE = re.compile(r"(?i)[\d_]\.?e[-+]?[\d_]{4}|(?<![a-z])nanj?(?![a-z])")
_TAG = re.compile(r"(?s)<answer>(.*?)</answer>")
_MARK = re.compile(r"(?i)\banswer\**:\**")
_NUMBER = re.compile(r"(?<![\w./^])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w/])", re.ASCII)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_: Any
) -> dict[str, float]:
    """Return `score`, the scorer's own from 0 to 1, and `acc`: 1 for a score of 1, otherwise 0.

    `ground_truth` is JSON: task, level, and reasoning_gym's whole entry. No response raises an error, but a ground
    truth raises one if the scorer of its task runs code.
    """
    truth = json.loads(ground_truth)
    entry, tasks = truth["entry"], _built(truth["task"], truth["level"])
    answer = answer_in(solution_str, entry["answer"])
    score = 0.0
    if len(answer) <= LONGEST and (answer == entry["answer"] or not _NO_VALUE.search(answer)):
        with suppress(Exception):  # any error: scorers index, convert and recurse into answers that they do not expect
            score = float(tasks.score_answer(answer, entry))
    score = min(score, 1.0) if score >= 0 else 0.0  # NaN becomes 0
    return {"score": score, "acc": float(score == 1)}


def answer_in(response: str, truth: str) -> str:
    r"""Return the answer that a response gives: in <answer> tags, after "Answer:", in \boxed{}, or its last line.

    If the true answer is a number, the last number of this text counts. If it has several lines, all lines count.

    Example:
        >>> answer_in("3 * 4 = 12\nAnswer: it is 12.", "12"), answer_in("The capital is\nParis", "Rome")
        ('12', 'Paris')
    """
    is_number, tagged, marked = _NUMBER.fullmatch(truth), _TAG.findall(response), _MARK.split(response)
    text = tagged[-1] if tagged else marked[-1]
    if (box := braced_box(text)) is not None:
        text = box
    elif not is_number or len(marked) > 1:
        text = text if "\n" in truth else text.strip().split("\n")[0 if tagged or len(marked) > 1 else -1]
    numbers = _NUMBER.findall(text) if is_number else []
    listed = len(numbers) > 1 and not re.search(r"[^\s\d.,;+-]", text)  # a list of numbers is no answer
    return numbers[-1] if numbers and not listed else text.strip()


def require_reasoning_gym() -> None:
    """Raise an error that says what to do if reasoning_gym is not installed."""
    if find_spec("reasoning_gym") is None:
        raise EnvironmentMismatchError("reasoning_gym, which has tasks and scorers, is not installed", remedy=INSTALL)


def build(task: str, level: int, **sizes: int) -> Any:
    """Return reasoning_gym's data set of a task at a level of its curriculum; `sizes` are its `seed` and `size`."""
    require_reasoning_gym()
    if task in UNSAFE:
        problem = "its scorer runs the answer as Python, so a response could run any code on this machine"
        raise ConfigurationError(problem, setting="task", value=task, allowed="a task whose scorer only reads")
    from reasoning_gym.factory import create_curriculum, create_dataset, has_curriculum

    if not has_curriculum(task):
        return create_dataset(task, **sizes)
    curriculum = create_curriculum(task)
    curriculum.set_global_level(level)
    return create_dataset(task, **vars(curriculum.generate_configuration(sizes)))


_built = functools.cache(build)
