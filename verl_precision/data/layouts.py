"""From a data set's own columns to question and answer. A row that does not fit is an error, never a guess."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_precision.errors import ConfigurationError


@dataclass(frozen=True)
class Question:
    """What every layout comes down to.

    Attributes:
        text: the problem, without any instruction to the model.
        answer: what is right.
        source: where the problem comes from, as the data set says; empty if it does not.
    """

    text: str
    answer: str
    source: str = ""


@dataclass(frozen=True)
class Layout:
    """Columns that must be there, and what to make of a row."""

    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Question]


# The words around a problem in DAPO's own file (BytedTsinghua-SIA/DAPO-Math-17k).
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
GURU_AFTER = "Please output the final answer within \\boxed{}."


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{...} of a solution, braces balanced.

    Raises:
        ConfigurationError: if there is none.
    """
    start = solution.rfind("\\boxed{")
    depth = 0
    for position in range(start + len("\\boxed"), len(solution)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[start + len("\\boxed{") : position]
    # Some solutions of MATH are written \boxed 2 or \fbox{2}.
    for mark, end in (("\\boxed ", "$"), ("\\fbox{", "}")):
        _, found, after = solution.rpartition(mark)
        if found:
            return after.partition(end)[0].strip()
    raise ConfigurationError(f"no \\boxed answer in the solution {solution[-80:]!r}")


def _math(row: Mapping[str, Any]) -> Question:
    return Question(row["problem"], last_boxed(row["solution"]))


def _verl_row(row: Mapping[str, Any]) -> Question:
    """Take DAPO's and Guru's words off, so that any template can go on."""
    user = [message["content"] for message in row["prompt"] if message["role"] == "user"]
    if len(user) != 1:
        raise ConfigurationError(f"{len(user)} user messages in prompt; 1 is wanted")
    text = user[0].removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER).strip().removesuffix(GURU_AFTER).strip()
    return Question(text, str(row["reward_model"]["ground_truth"]), str(row["data_source"]))


LAYOUTS = {
    "math": Layout(("problem", "solution"), _math),
    "problem_answer": Layout(("problem", "answer"), lambda row: Question(row["problem"], str(row["answer"]))),
    "aime": Layout(("Problem", "Answer"), lambda row: Question(row["Problem"], str(row["Answer"]))),
    "verl": Layout(("prompt", "reward_model", "data_source"), _verl_row),
}
