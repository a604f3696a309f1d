"""avg@k, pass@k and paired differences. Problems are the sampling unit: a standard error is that over problems.

Let xᵢ be the share of the k responses to problem i that are correct, and P the number of problems. Then avg@k is
x̄ = Σ xᵢ / P, and its standard error √(Σ (xᵢ - x̄)² / (P (P - 1))): the responses to one problem form a cluster. For two
dtypes, xᵢ is replaced by the difference of both on problem i, so that how hard the problem is cancels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.journal import Key
from verl_precision.tools.show.tables import finite, markdown_page, markdown_table


class Drawn(NamedTuple):
    """What is kept of a response in memory."""

    tokens: int  # its length in the longest context
    cut: bool  # whether it ended because that context was full
    correct: tuple[bool, ...]  # for each context


Outcomes = dict[str, dict[Key, Drawn]]  # by dtype


@dataclass(frozen=True, eq=False)
class Difference:
    """What a dtype gives for a data set in a context, beyond another dtype."""

    data: str
    context: int
    dtype: str
    reference: str  # dtype that is taken away; empty where none is
    shares_P: np.ndarray  # xᵢ

    @property
    def average(self) -> float:
        """avg@k, or its difference."""
        return float(self.shares_P.mean())

    @property
    def error(self) -> float:
        """Standard error of it over problems; NaN for a single one."""
        return standard_error(self.shares_P)


@dataclass(frozen=True, eq=False)
class Accuracy(Difference):
    """One data set in one dtype and one context."""

    truncated: float  # share of the responses that the context cut
    mean_tokens: float  # of a response

    @property
    def passed(self) -> float:
        """pass@k: share of the problems with a correct response."""
        return float((self.shares_P > 0).mean())


def standard_error(values_P: np.ndarray) -> float:
    """Return the standard error of the mean of values that are independent; NaN for a single one."""
    return float(values_P.std(ddof=1) / math.sqrt(len(values_P))) if len(values_P) > 1 else math.nan


def accuracies(
    evaluation: Evaluation, sets: Mapping[str, Sequence[str]], prompts: Mapping[str, Sequence[int]], outcomes: Outcomes
) -> list[Accuracy]:
    """Return one entry for each context, data set and dtype, in this order; `sets` has each set's identifiers."""
    found = []
    for place, context in enumerate(evaluation.contexts):
        for data, names in sets.items():
            room_P = np.array([context - len(prompts[name]) for name in names])
            for dtype in evaluation.dtypes:
                drawn = [[outcomes[dtype][name, index] for index in range(evaluation.responses)] for name in names]
                correct_PK = np.array([[each.correct[place] for each in row] for row in drawn])
                tokens_PK = np.array([[each.tokens for each in row] for row in drawn])
                cut_PK = np.array([[each.cut for each in row] for row in drawn]) | (tokens_PK > room_P[:, None])
                tokens = float(np.minimum(tokens_PK, room_P[:, None]).mean())
                found.append(Accuracy(data, context, dtype, "", correct_PK.mean(axis=1), float(cut_PK.mean()), tokens))
    return found


def differences(found: Sequence[Accuracy]) -> list[Difference]:
    """Return the paired difference of each two dtypes, the later one minus the earlier one."""
    return [
        Difference(later.data, later.context, later.dtype, earlier.dtype, later.shares_P - earlier.shares_P)
        for earlier, later in combinations(found, 2)
        if (earlier.data, earlier.context) == (later.data, later.context)
    ]


def markdown(
    evaluation: Evaluation,
    found: Sequence[Accuracy],
    changes: Sequence[Difference],
    left_out: Mapping[str, int],
    versions: Mapping[str, str],
) -> str:
    """Return the tables with what is needed to make them again."""
    k = evaluation.responses
    about = (
        f"{evaluation.model}; {k} responses to each problem, temperature {evaluation.temperature:g}, top_p "
        f"{evaluation.top_p:g}, seed {evaluation.seed}; reward {evaluation.reward}."
    )
    columns = ["data", "context", "dtype", f"avg@{k}", f"pass@{k}", "truncated", "mean tokens", "problems"]
    rows = [
        [
            *(each.data, str(each.context), each.dtype, _percent(each.average, each.error), _percent(each.passed)),
            *(_percent(each.truncated), f"{each.mean_tokens:.0f}", str(len(each.shares_P))),
        ]
        for each in found
    ]
    lines = ["Accuracies in percent, ± the standard error over problems:", "", *markdown_table(columns, rows)]
    if changes:
        rows = [
            [each.data, str(each.context), f"{each.dtype} - {each.reference}", _percent(each.average, each.error, "+")]
            for each in changes
        ]
        lines += ["", "The same checkpoint in two dtypes, problem by problem, in points:", ""]
        lines += markdown_table(["data", "context", "dtypes", f"difference of avg@{k}"], rows)
    for name, count in left_out.items():
        if count:
            lines.append(f"\nLeft out of {name}, because the reward cannot read the answer: {count} problems.")
    return markdown_page("Accuracy", about, versions, lines)


def _percent(share: float, error: float = math.nan, sign: str = "") -> str:
    return format(100 * share, f"{sign}.2f") + ("" if math.isnan(error) else f" ± {100 * error:.2f}")


def summary(
    found: Sequence[Accuracy], changes: Sequence[Difference], problems: dict[str, list[str]], left_out: dict[str, int]
) -> dict[str, Any]:
    """Return everything measured for JSON, the share of correct responses to each problem included."""

    def fields(each: Difference, *more: str) -> dict[str, Any]:
        shown = {name: getattr(each, name) for name in ("data", "context", "dtype", "average", *more)}
        return shown | {"standard_error": finite(each.error)}

    results = [
        fields(each, "truncated", "mean_tokens")
        | {"pass": each.passed, "problems": dict(zip(problems[each.data], each.shares_P.tolist(), strict=True))}
        for each in found
    ]
    return {"results": results, "differences": [fields(each, "reference") for each in changes], "left_out": left_out}
