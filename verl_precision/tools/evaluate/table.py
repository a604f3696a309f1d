"""The result as Markdown, which is shown too, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_precision.tools.evaluate.accuracy import Accuracy, Difference
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.show.tables import finite, markdown_page, markdown_table


def markdown(
    evaluation: Evaluation,
    found: Sequence[Accuracy],
    changes: Sequence[Difference],
    left_out: Mapping[str, int],
    versions: Mapping[str, str],
) -> str:
    """Return the tables with what is needed to make them again."""
    places = list(dict.fromkeys((each.data, each.context) for each in found))
    by_place = {(each.data, each.context, each.dtype): _percent(each.average, each.error) for each in found}
    k = evaluation.responses
    about = (
        f"{evaluation.model}; {k} responses to each problem, temperature {evaluation.temperature:g}, top_p "
        f"{evaluation.top_p:g}, seed {evaluation.seed}; reward {evaluation.reward}."
    )
    lines = [
        f"avg@{k} in percent, ± its standard error over problems:",
        "",
        *markdown_table(
            ["dtype", *(f"{data} ({context})" for data, context in places)],
            [[dtype, *(by_place[data, context, dtype] for data, context in places)] for dtype in evaluation.dtypes],
        ),
        "",
        *markdown_table(
            ["data", "context", "dtype", f"avg@{k}", f"pass@{k}", "truncated", "mean tokens", "problems"],
            [
                [
                    *(each.data, str(each.context), each.dtype, _percent(each.average, each.error)),
                    *(_percent(each.passed), _percent(each.truncated), f"{each.mean_tokens:.0f}"),
                    str(len(each.shares_P)),
                ]
                for each in found
            ],
        ),
    ]
    if changes:
        header = ["data", "context", "dtypes", f"difference of avg@{k}"]
        rows = [
            [each.data, str(each.context), f"{each.dtype} - {each.reference}", _percent(each.average, each.error, "+")]
            for each in changes
        ]
        lines += [
            "",
            "The same checkpoint in two dtypes, problem by problem, in points:",
            "",
            *markdown_table(header, rows),
        ]
    lines += [
        f"\nLeft out of {name}, because the reward cannot read the answer: {count} problems."
        for name, count in left_out.items()
        if count
    ]
    return markdown_page("Accuracy", about, versions, lines)


def _percent(share: float, error: float = math.nan, sign: str = "") -> str:
    return format(100 * share, f"{sign}.2f") + ("" if math.isnan(error) else f" ± {100 * error:.2f}")


def summary(
    found: Sequence[Accuracy],
    changes: Sequence[Difference],
    problems: Mapping[str, Sequence[str]],
    left_out: Mapping[str, int],
) -> dict[str, Any]:
    """Return everything measured for JSON, the share of correct responses to each problem included."""
    return {
        "results": [
            {
                **{"data": each.data, "context": each.context, "dtype": each.dtype, "average": each.average},
                **{"standard_error": finite(each.error), "pass": each.passed, "truncated": each.truncated},
                "mean_tokens": each.mean_tokens,
                "problems": dict(zip(problems[each.data], each.shares_P.tolist(), strict=True)),
            }
            for each in found
        ],
        "differences": [
            {
                **{"data": each.data, "context": each.context, "dtype": each.dtype, "reference": each.reference},
                **{"average": each.average, "standard_error": finite(each.error)},
            }
            for each in changes
        ],
        "left_out": left_out,
    }
