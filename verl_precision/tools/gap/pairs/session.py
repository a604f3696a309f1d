"""Runs a mismatch job: sampling, scoring, then figures and a table, in which rank 1 has the smallest mismatch."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_precision.base.versions import installed_versions
from verl_precision.mismatch.prediction import LENGTHS, predicted_spread, surviving_estimators, weighting_of
from verl_precision.presets import preset_names
from verl_precision.tools.engines.engine import SamplerSettings, ScorerSettings
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import find_model
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.pairs.figures import write_figures
from verl_precision.tools.gap.pairs.measure import Pair, measure, ranked
from verl_precision.tools.gap.settings import MismatchJob
from verl_precision.tools.jobs.job import Job, Series, open_store
from verl_precision.tools.jobs.problems import prompt_tokens
from verl_precision.tools.jobs.settings import FLASH
from verl_precision.tools.show.tables import finite, markdown_page, markdown_table

_COLUMNS = (
    ("mean abs gap", "log_prob_gap_abs_mean", ".2e"),
    ("p99 abs gap", "log_prob_gap_abs_p99", ".2e"),
    ("Pearson", "probs_pearson", ".6f"),
    ("seq. log ratio, std", "sequence_log_ratio_std", ".2e"),
)
_COLUMNS_IF_ANY = (("non-finite", "nonfinite_tokens", ".0f"), ("positive", "positive_log_probs", ".0f"))


def measure_mismatch(job: MismatchJob, console: Console) -> list[Pair]:
    """Finish the job in its folder, write the results, and return them: one for each pair of dtypes."""
    under_way, model = Job(job, console), find_model(job.model)
    model.require_dtypes("--rollout-dtype", job.rollout_dtypes)
    model.require_arithmetic(job.arithmetic)
    prompt_ids = prompt_tokens(job, model, model, job.max_response_tokens)
    length = max(map(len, prompt_ids)) + job.max_response_tokens
    with open_store(under_way, job, prompt_ids, model_fingerprint=model.fingerprint) as store:
        for rollout in job.rollout_dtypes:
            sampler = SamplerSettings(
                model=job.model, dtype=rollout, max_model_len=length, log_probs=True, arithmetic=job.arithmetic
            )  # fmt: skip
            under_way.complete(f"sample-{rollout}", [Series(store, rollout)], partial(VllmEngine, sampler))
        for train in job.train_dtypes:
            scorer = ScorerSettings(
                model=job.model, dtype=train, attention=job.attention, micro_batch_tokens=job.micro_batch_tokens,
                packed=job.attention == FLASH, arithmetic=job.arithmetic,
            )  # fmt: skip
            of_all = [Series(store, rollout, train) for rollout in job.rollout_dtypes]
            under_way.complete(f"score-{train}", of_all, partial(TrainerEngine, scorer))
        pairs = [measure(store, rollout, train) for rollout, train in job.pairs]
    under_way.write(summary(pairs, len(prompt_ids)), markdown(pairs, job, installed_versions(), len(prompt_ids)))
    title = "/".join(Path(job.model).parts[-2:])  # a folder may be called `model`
    figures = write_figures(job.folder, pairs, title)
    cause = f"\nnext, what causes the gap: verl-precision explain --model {job.model}"
    under_way.show_written(["table.md", "summary.json", *figures], cause)
    return pairs


def cells(pairs: list[Pair]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, ranked; log-probs that are not finite, or positive, have a column if they occur."""
    columns = [*_COLUMNS, *(column for column in _COLUMNS_IF_ANY if any(pair.metric(column[1]) > 0 for pair in pairs))]
    rows = []
    for rank, pair in enumerate(ranked(pairs), 1):
        k3 = _text(pair.k3, ".2e") + ("" if math.isnan(pair.k3_error) else f" ± {pair.k3_error:.0e}")
        tokens, share = pair.metric("tokens"), pair.metric("equal_fraction")
        equal = ["undefined" if math.isnan(share) else f"{share * tokens:.0f} of {tokens:.0f}"]
        values = (_text(pair.metric(key), form) for _, key, form in columns)
        rows.append([str(rank), pair.rollout, pair.train, k3, *values, *equal])
    return ["rank", "rollout", "train", "k3 KL", *(title for title, _, _ in columns), "equal tokens"], rows


def growth_cells(pairs: list[Pair]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the growth with length, one ranked column a pair; no rows for short responses."""
    order, rows = ranked(pairs), []
    for length in sorted({length for pair in pairs for length in pair.growth}):
        found = [pair.growth.get(length, (0, math.nan)) for pair in order]
        rows.append([str(length), *(f"{_text(std, '.2e')} of {count}" for count, std in found)])
    return ["tokens", *(f"{pair.rollout}, {pair.train}" for pair in order)], rows


def prediction_cells(pairs: list[Pair]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of what each pair's k3 predicts at `LENGTHS`; no rows without a k3."""
    rows = []
    for k3, name in ((pair.k3, f"{pair.rollout}, {pair.train}") for pair in ranked(pairs) if not math.isnan(pair.k3)):
        for n in LENGTHS:
            lost = sorted({*preset_names("estimator")} - {*surviving_estimators(k3, n)})
            numbers = f"{predicted_spread(k3, n):.2g}", f"{weighting_of('pg_seq_is').share(k3, n):.0%}"
            rows.append([name, f"{n:,}", *numbers, ", ".join(lost) or "none"])
    return ["rollout, train", "tokens", "spread", "share", "too few responses for"], rows


def _text(value: float, form: str) -> str:
    return "undefined" if math.isnan(value) else format(value, form)


def markdown(pairs: list[Pair], settings: MismatchJob, versions: dict[str, str], prompts: int) -> str:
    """Return the table and the settings that reproduce it; `prompts` is the number of prompts."""
    about = (
        f"{settings.model}; {prompts} prompts ({settings.prompts}), {settings.responses} responses each of up to "
        f"{settings.max_response_tokens} tokens; seed {settings.seed}; attention of the trainer: {settings.attention}; "
        f"arithmetic: {settings.arithmetic}."
    )
    lines = [*markdown_table(*cells(pairs)), "", "Per token, in nats; ± is the standard error over responses."]
    header, rows = growth_cells(pairs)
    if rows:
        lines += ["", "Spread (std) of the log ratio of a response's first tokens, nats, by their number:", ""]
        lines += markdown_table(header, rows)
    lines += ["", "Predicted from k3: spread of log-weights, and effective share of the responses with pg_seq_is:", ""]
    lines += markdown_table(*prediction_cells(pairs))
    return markdown_page("Training-inference mismatch, offline", about, versions, lines)


def summary(pairs: list[Pair], prompts: int) -> dict[str, Any]:
    """Return everything measured for JSON, with the pairs ranked; `prompts` is the number of prompts."""
    return {
        "pairs": [
            {
                "rollout": pair.rollout, "train": pair.train, "empty_responses": pair.empty_responses,
                "k3_kl_standard_error": finite(pair.k3_error),
                "growth": {
                    length: {"responses": count, "sequence_log_ratio_std": std}
                    for length, (count, std) in pair.growth.items()
                },
                "predicted_spread": {n: predicted_spread(pair.k3, n) for n in LENGTHS if pair.k3 >= 0},
                "surviving_estimators": {n: surviving_estimators(pair.k3, n) for n in LENGTHS if pair.k3 >= 0},
                **{key: finite(value) for key, value in pair.metrics.items()},
            }
            for pair in ranked(pairs)
        ],
        "prompt_count": prompts,
    }  # fmt: skip
