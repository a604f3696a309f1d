"""avg@k, pass@k and paired differences. Problems are the sampling unit: a standard error is over problems.

Let xᵢ be the share of the k responses to problem i that are correct, and P the number of problems. Then avg@k is
x̄ = Σ xᵢ / P, and its standard error √(Σ (xᵢ - x̄)² / (P (P - 1))): the responses to one problem form a cluster. For two
dtypes, xᵢ is replaced by the difference of both on problem i, so that the problem's difficulty cancels.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pandas as pd

from verl_precision.tools.jobs.settings import Evaluation
from verl_precision.tools.show.tables import finite, markdown_page

PLACE = ["context", "data", "dtype"]


def responses(
    evaluation: Evaluation, sets: Mapping[str, Sequence[str]], prompts: Mapping[str, Sequence[int]], drawn: pd.DataFrame
) -> pd.DataFrame:
    """Return a row for each response, cut at each context; `sets` has the identifiers of each data set's problems.

    `drawn` has the records of the journal, in any order.
    """
    drawn, found = drawn.set_index(["dtype", "problem", "response"]), []
    lengths = {name: len(token_ids) for name, token_ids in prompts.items()}
    for place, context in enumerate(evaluation.contexts):
        for data, names in sets.items():
            here = drawn.loc[[*product(evaluation.dtypes, names, range(evaluation.responses))]].reset_index()
            room = context - here["problem"].map(lengths)
            cut = (here["finish_reason"] == "length") | (here["tokens"] > room)
            correct, tokens = here["correct"].str[place].astype(bool), here["tokens"].clip(upper=room)
            found.append(here.assign(context=context, data=data, correct=correct, truncated=cut, tokens=tokens))
    return pd.concat(found)


def shares(drawn: pd.DataFrame) -> pd.Series:
    """Return xᵢ, by context, data set, dtype and problem."""
    return drawn.groupby([*PLACE, "problem"], sort=False)["correct"].mean()


def accuracies(drawn: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each context, data set and dtype, in this order; the error of a single problem is NaN."""
    of_problems, of_responses = shares(drawn).groupby(PLACE, sort=False), drawn.groupby(PLACE, sort=False)
    columns = {
        "average": of_problems.mean(),
        "standard_error": of_problems.sem(),
        "pass": (shares(drawn) > 0).groupby(PLACE, sort=False).mean(),
        "truncated": of_responses["truncated"].mean(),
        "mean_tokens": of_responses["tokens"].mean(),
        "problems": of_problems.size(),
    }
    return pd.DataFrame(columns).reset_index()


def differences(drawn: pd.DataFrame) -> pd.DataFrame:
    """Return the paired difference of each two dtypes: the later one minus the earlier one (`reference`)."""
    by_dtype, found = shares(drawn).unstack("dtype"), []
    for earlier, later in combinations(drawn["dtype"].unique(), 2):
        change = (by_dtype[later] - by_dtype[earlier]).groupby(PLACE[:2], sort=False)
        of_pair = pd.DataFrame({"average": change.mean(), "standard_error": change.sem()}).reset_index()
        found.append(of_pair.assign(dtype=later, reference=earlier))
    return pd.concat(found) if found else pd.DataFrame()


def markdown(evaluation: Evaluation, drawn: pd.DataFrame, left_out: Mapping[str, int], versions: dict[str, str]) -> str:
    """Return the tables and the settings that reproduce them."""
    changes = differences(drawn).to_dict("records")
    tables = {"accuracies": accuracies(drawn).to_dict("records"), "differences": changes, "left_out": left_out}
    return markdown_page(__file__, versions, job=evaluation, percent=_percent, **tables)


def _percent(share: float, error: float = math.nan, sign: str = "") -> str:
    return format(100 * share, f"{sign}.2f") + ("" if math.isnan(error) else f" ± {100 * error:.2f}")


def summary(drawn: pd.DataFrame, left_out: dict[str, int]) -> dict[str, Any]:
    """Return everything measured for JSON, the share of correct responses to each problem included."""
    of_problems = shares(drawn)
    results = [
        each | {"problems": of_problems[tuple(each[name] for name in PLACE)].to_dict()}
        for each in accuracies(drawn).to_dict("records")
    ]
    changes = differences(drawn).to_dict("records")
    for each in (*results, *changes):
        each["standard_error"] = finite(each["standard_error"])
    return {"results": results, "differences": changes, "left_out": left_out}
