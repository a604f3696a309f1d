"""avg@k, pass@k and paired differences. Problems are the sampling unit: a standard error is that over problems.

Let xᵢ be the share of the k responses to problem i that are correct, and P the number of problems. Then avg@k is
x̄ = Σ xᵢ / P, and its standard error √(Σ (xᵢ - x̄)² / (P (P - 1))): the responses to one problem form a cluster. For two
dtypes, xᵢ is replaced by the difference of both on problem i, so that how hard the problem is cancels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from verl_precision.tools.evaluate.responses import Outcomes, Task
from verl_precision.tools.evaluate.settings import Evaluation


@dataclass(frozen=True, eq=False)
class Accuracy:
    """One data set in one dtype and one context."""

    data: str
    context: int
    dtype: str
    shares_P: np.ndarray  # xᵢ
    truncated: float  # share of the responses that the context cut
    mean_tokens: float  # of a response

    @property
    def average(self) -> float:
        """avg@k."""
        return float(self.shares_P.mean())

    @property
    def error(self) -> float:
        """Standard error of avg@k over problems; NaN for a single one."""
        return standard_error(self.shares_P)

    @property
    def passed(self) -> float:
        """pass@k: share of the problems with a correct response."""
        return float((self.shares_P > 0).mean())


@dataclass(frozen=True)
class Difference:
    """What another dtype changes for the same checkpoint, data set and context."""

    data: str
    context: int
    dtype: str
    reference: str  # dtype that is taken away
    average: float  # avg@k of `dtype` minus that of `reference`
    error: float  # standard error over problems


def standard_error(values_P: np.ndarray) -> float:
    """Return the standard error of the mean of values that are independent; NaN for a single one."""
    return float(values_P.std(ddof=1) / math.sqrt(len(values_P))) if len(values_P) > 1 else math.nan


def accuracies(
    evaluation: Evaluation, sets: Mapping[str, Sequence[str]], tasks: Mapping[str, Task], outcomes: Outcomes
) -> list[Accuracy]:
    """Return one entry for each context, data set and dtype, in this order.

    Args:
        evaluation: What was evaluated.
        sets: Identifiers of the problems of each data set.
        tasks: The problems by identifier.
        outcomes: Every response.
    """
    found = []
    for place, context in enumerate(evaluation.contexts):
        for data, names in sets.items():
            room_P = np.array([context - len(tasks[name].prompt) for name in names])
            for dtype in evaluation.dtypes:
                drawn = [[outcomes[dtype][name, index] for index in range(evaluation.responses)] for name in names]
                correct_PK = np.array([[each.correct[place] for each in row] for row in drawn])
                tokens_PK = np.array([[each.tokens for each in row] for row in drawn])
                cut_PK = np.array([[each.cut for each in row] for row in drawn]) | (tokens_PK > room_P[:, None])
                tokens = float(np.minimum(tokens_PK, room_P[:, None]).mean())
                found.append(Accuracy(data, context, dtype, correct_PK.mean(axis=1), float(cut_PK.mean()), tokens))
    return found


def differences(found: Sequence[Accuracy]) -> list[Difference]:
    """Return the paired difference of each two dtypes, the later one minus the earlier one."""
    return [
        Difference(
            later.data,
            later.context,
            later.dtype,
            earlier.dtype,
            average=float((later.shares_P - earlier.shares_P).mean()),
            error=standard_error(later.shares_P - earlier.shares_P),
        )
        for earlier, later in combinations(found, 2)
        if (earlier.data, earlier.context) == (later.data, later.context)
    ]
