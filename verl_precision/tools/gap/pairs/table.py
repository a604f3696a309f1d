"""The result as Markdown, which is shown too, and as JSON. Rank 1 has the smallest mismatch."""

import math
from typing import Any

from verl_precision.tools.gap.pairs.measure import Pair
from verl_precision.tools.gap.pairs.settings import MismatchJob
from verl_precision.tools.show.tables import finite, markdown_page, markdown_table

_COLUMNS = (
    ("mean abs gap", "log_prob_gap_abs_mean", ".2e"),
    ("p99 abs gap", "log_prob_gap_abs_p99", ".2e"),
    ("Pearson", "probs_pearson", ".6f"),
    ("seq. log ratio, std", "sequence_log_ratio_std", ".2e"),
    ("tokens", "tokens", ".0f"),
)
_COLUMNS_IF_ANY = (("non-finite", "nonfinite_tokens", ".0f"), ("positive", "positive_log_probs", ".0f"))


def ranked(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs by their k3, smallest first; those without a finite token last."""
    return sorted(pairs, key=lambda pair: (math.isnan(pair.k3), pair.k3))


def cells(pairs: list[Pair]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text, ranked.

    Tokens whose log-prob is not finite, or positive, get a column if there are any.
    """
    columns = [*_COLUMNS, *(column for column in _COLUMNS_IF_ANY if any(pair.metric(column[1]) > 0 for pair in pairs))]
    rows = []
    for rank, pair in enumerate(ranked(pairs), 1):
        k3 = _text(pair.k3, ".2e") + ("" if math.isnan(pair.k3_error) else f" ± {pair.k3_error:.0e}")
        values = [_text(pair.metric(name), form) for _, name, form in columns]
        rows.append([str(rank), pair.rollout, pair.train, k3, *values])
    return ["rank", "rollout", "train", "k3 KL", *(title for title, _, _ in columns)], rows


def _text(value: float, form: str) -> str:
    return "undefined" if math.isnan(value) else format(value, form)


def markdown(pairs: list[Pair], settings: MismatchJob, versions: dict[str, str], prompts: int) -> str:
    """Return the table with what is needed to make it again; `prompts` is their number."""
    about = (
        f"{settings.model}; {prompts} prompts ({settings.prompts}), {settings.responses} responses each of up to "
        f"{settings.max_response_tokens} tokens; seed {settings.seed}; attention of the trainer: {settings.attention}."
    )
    lines = [*markdown_table(*cells(pairs)), "", "Per token, in nats; ± is the standard error over responses."]
    return markdown_page("Training-inference mismatch, offline", about, versions, lines)


def summary(pairs: list[Pair], prompts: int) -> dict[str, Any]:
    """Return everything measured for JSON, with the pairs ranked; `prompts` is their number."""
    return {
        "pairs": [
            {
                "rollout": pair.rollout,
                "train": pair.train,
                "empty_responses": pair.empty_responses,
                "k3_kl_standard_error": finite(pair.k3_error),
                **{key: finite(value) for key, value in pair.metrics.items()},
            }
            for pair in ranked(pairs)
        ],
        "prompt_count": prompts,
    }
