"""The data sets, layouts and templates of catalog.yaml, and how a row becomes question and answer."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.tools.rewards.math_answers import braced_box

Row = Mapping[str, Any]


class PaperDataSet(NamedTuple):
    """One data set; catalog.yaml explains the fields."""

    hub: str
    splits: list[str]
    layouts: list[str]
    data_source: str
    template: str
    problems: tuple[int, int]
    number_from: str
    config: str | None = None
    data_file: str | None = None


class Question(NamedTuple):
    """A question and its answer, from any layout."""

    text: str  # the problem, without any instruction to the model
    answer: str
    source: str = ""  # where the problem comes from, as the data set says


_CONTENT = table_of(__file__)

CATALOG = {name: PaperDataSet(**values) for name, values in _CONTENT["data_sets"].items()}
LAYOUTS: dict[str, dict[str, str]] = _CONTENT["layouts"]  # meaning -> column
TEMPLATES: dict[str, dict[str, str]] = _CONTENT["templates"]  # role -> text with {question}
MODEL, TASKS = "smollm2_135m_instruct", "reasoning_gym"
# Options of each name, besides --output.
_OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(CATALOG, ("template", "source", "synthetic", "skip-size-check"))
_OPTIONS |= {MODEL: ("source",), TASKS: ("task", "level", "size", "seed")}
NAMES = tuple(_OPTIONS)
_DAPO_BEFORE, _DAPO_AFTER = TEMPLATES["dapo"]["user"].split("{question}")
_GURU_AFTER = "Please output the final answer within \\boxed{}."


def require_options(name: str, given: Mapping[str, object]) -> None:
    """Refuse an unknown name of `verl-precision data`, and an option that does not apply to it."""
    if name not in NAMES:
        raise ConfigurationError(f"data {name}: no such data set", allowed=", ".join(NAMES))
    if other := next((option for option in given if option not in _OPTIONS[name]), None):
        allowed = ", ".join(f"--{option}" for option in ("output", *_OPTIONS[name]))
        problem = f"{name} has no such option"
        raise ConfigurationError(problem, setting=f"--{other}", value=given[other], allowed=allowed)


def last_boxed(solution: str) -> str:
    r"""Return the last boxed answer of a data set's solution; a solution without one is a ConfigurationError."""
    if (box := braced_box(solution)) is not None:
        return box
    # Some solutions of MATH are written \boxed 2 or \fbox{2}.
    for mark, end in (("\\boxed ", "$"), ("\\fbox{", "}")):
        _, found, after = solution.rpartition(mark)
        if found:
            return after.partition(end)[0].strip()
    raise ConfigurationError(f"no \\boxed answer in the solution {solution[-80:]!r}")


def read_row(layout: str, row: Row) -> Question:
    """Return question and answer of a row in a layout. A row that does not fit is an error, never a guess."""
    question, answer = (row[LAYOUTS[layout][meaning]] for meaning in ("question", "answer"))
    if layout != "verl":
        return Question(question, _answer(layout, answer))
    user = [message["content"] for message in question if message["role"] == "user"]
    if len(user) != 1:
        raise ConfigurationError(f"{len(user)} user messages in prompt; 1 is expected")
    # DAPO and Guru put instructions around a problem. These are removed, so that any template can be used.
    text = user[0].removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER).strip().removesuffix(_GURU_AFTER).strip()
    return Question(text, str(answer["ground_truth"]), str(row["data_source"]))


def _answer(layout: str, answer: Any) -> str:
    if layout == "math":
        return last_boxed(answer)
    if layout == "gsm8k":
        _, found, last = answer.rpartition("####")
        if not found:
            raise ConfigurationError(f"no #### in the solution {answer[-80:]!r}")
        return last.strip().replace(",", "")
    # Some data sets store whole numbers as floats. A missing answer becomes an empty one, which is refused later.
    return "" if answer is None else re.sub(r"^(-?\d+)\.0$", r"\1", str(answer))
