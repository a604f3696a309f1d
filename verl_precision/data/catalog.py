"""The data sets and templates of catalog.yaml, and what their columns mean.

A layout turns a row of a data set into question and answer. A row that does not fit is an error, never a guess.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from verl_precision.errors import ConfigurationError

Row = Mapping[str, Any]


class PaperDataSet(NamedTuple):
    """One data set of the paper; catalog.yaml explains the fields."""

    hub: str
    splits: list[str]
    layouts: list[str]
    data_source: str
    template: str
    problems: tuple[int, int]
    number_from: str
    data_file: str | None = None


class Question(NamedTuple):
    """What every layout comes down to."""

    text: str  # the problem, without any instruction to the model
    answer: str
    source: str = ""  # where the problem comes from, as the data set says


class Layout(NamedTuple):
    """Columns of a data set, what to make of a row, and a made-up row with a question and its answer."""

    columns: set[str]
    read: Callable[[Row], Question]
    make: Callable[[str, int], Row]


_CONTENT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

CATALOG = {name: PaperDataSet(**values) for name, values in _CONTENT["data_sets"].items()}
TEMPLATES: dict[str, dict[str, str]] = _CONTENT["templates"]  # role -> text with {question}
_DAPO_BEFORE, _DAPO_AFTER = TEMPLATES["dapo"]["user"].split("{question}")
_GURU_AFTER = "Please output the final answer within \\boxed{}."


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{...} of a solution, braces balanced.

    Raises:
        ConfigurationError: If there is none.
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


def _read_verl(row: Row) -> Question:
    """Take off the words that DAPO and Guru put around a problem, so that any template can go on."""
    user = [message["content"] for message in row["prompt"] if message["role"] == "user"]
    if len(user) != 1:
        raise ConfigurationError(f"{len(user)} user messages in prompt; 1 is wanted")
    text = user[0].removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER).strip().removesuffix(_GURU_AFTER).strip()
    return Question(text, str(row["reward_model"]["ground_truth"]), str(row["data_source"]))


def _make_verl(question: str, answer: int) -> Row:
    prompt = [{"role": "user", "content": _DAPO_BEFORE + question + _DAPO_AFTER}]
    return {"data_source": "stand_in", "prompt": prompt, "reward_model": {"ground_truth": str(answer)}}


LAYOUTS = {
    "math": Layout(
        {"problem", "solution"},
        lambda row: Question(row["problem"], last_boxed(row["solution"])),
        lambda question, answer: {"problem": question, "solution": f"Adding gives $\\boxed{{{answer}}}$."},
    ),
    "problem_answer": Layout(
        {"problem", "answer"},
        lambda row: Question(row["problem"], str(row["answer"])),
        lambda question, answer: {"problem": question, "answer": str(answer)},
    ),
    "aime": Layout(
        {"Problem", "Answer"},
        lambda row: Question(row["Problem"], str(row["Answer"])),
        lambda question, answer: {"Problem": question, "Answer": answer},
    ),
    "verl": Layout({"prompt", "reward_model", "data_source"}, _read_verl, _make_verl),
}
