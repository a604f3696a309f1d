"""A mismatch job: sampling, scoring, then figures and a table, in which rank 1 has the smallest mismatch.

The figures show a bounded number of tokens: against the diagonal, by their distance from it, and responses by length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.versions import installed_versions
from verl_precision.mismatch.prediction import LENGTHS, predicted_spread, surviving_estimators, weighting_of
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.presets import preset_names
from verl_precision.tools.engines.engine import SamplerSettings, ScorerSettings
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import find_model
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.jobs.job import Job, Series, Store, open_store
from verl_precision.tools.jobs.problems import prompt_tokens
from verl_precision.tools.jobs.settings import FLASH, MismatchJob
from verl_precision.tools.show.colours import COLOURS
from verl_precision.tools.show.figures import INK, new_figure, style, write_png
from verl_precision.tools.show.tables import finite, markdown_page, markdown_table

TOKENS_SHOWN = 20_000
PREFIXES = tuple(2**power for power in range(6, 16))  # lengths at which the spread of log ratios is measured
_COLUMNS = (
    ("mean abs gap", "log_prob_gap_abs_mean", ".2e"),
    ("p99 abs gap", "log_prob_gap_abs_p99", ".2e"),
    ("Pearson", "probs_pearson", ".6f"),
    ("seq. log ratio, std", "sequence_log_ratio_std", ".2e"),
)
_COLUMNS_IF_ANY = (("non-finite", "nonfinite_tokens", ".0f"), ("positive", "positive_log_probs", ".0f"))
_TOKENS: dict[str, Any] = {"s": 3, "alpha": 0.25, "linewidths": 0, "rasterized": True}
_RESPONSES: dict[str, Any] = {**_TOKENS, "s": 9, "alpha": 0.5}
_LINE: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 0.8, "zorder": 0.5}


@dataclass(frozen=True, eq=False)
class Pair:
    """One rollout dtype (of vLLM) and one train dtype (of the trainer's forward)."""

    rollout: str
    train: str
    metrics: dict[str, float]  # `mismatch/...`, of docs/metrics.md
    k3_error: float  # standard error of the k3 over responses, nats; NaN with fewer than two
    empty_responses: int  # responses without a token, which count nowhere else
    probs: np.ndarray  # [2, K] trainer's and rollout's probability of K tokens, chosen at random with a fixed seed
    gaps: np.ndarray  # [K] log π - log μ of those tokens, nats
    lengths: np.ndarray  # [B] tokens of each response
    sequence_log_ratios: np.ndarray  # [B] Σₜ log π(yₜ) - log μ(yₜ), nats
    growth: dict[int, tuple[int, float]]  # length -> responses of that length or more, std of log ratios up to it

    def metric(self, name: str) -> float:
        """Return the metric `mismatch/<name>`; NaN where it is not defined."""
        return self.metrics.get(f"mismatch/{name}", math.nan)

    @property
    def k3(self) -> float:
        """k3 estimate of KL(μ‖π) per token, nats; NaN without a finite token."""
        return self.metric("k3_kl")


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


def measure(store: Store, rollout: str, train: str) -> Pair:
    """Return the statistics of a pair whose samples and scores are complete."""
    lengths_B, pi_N, mu_N = store.log_probs(rollout, train)
    filled_B = lengths_B > 0
    empty = int((~filled_B).sum())
    if not filled_B.any():
        problem = f"all {empty} responses sampled in {rollout} are empty: the model ended each one at once"
        remedy = "Check --prompts and the model's chat template."
        raise ConfigurationError(problem, allowed="prompts that the model answers", remedy=remedy)
    offsets, gap_N = np.concatenate([[0], np.cumsum(lengths_B)]), pi_N - mu_N
    pi, mu = (torch.nested.nested_tensor_from_jagged(torch.tensor(x), torch.tensor(offsets)) for x in (pi_N, mu_N))
    k3_N = np.expm1(gap_N) - gap_N
    log_ratios_B, k3_sums_B = np.add.reduceat([gap_N, k3_N], offsets[:-1][filled_B], axis=1)
    shown = np.random.default_rng(0).choice(len(pi_N), min(TOKENS_SHOWN, len(pi_N)), replace=False)
    return Pair(
        rollout=rollout,
        train=train,
        metrics=MismatchStatistics.measure(pi, mu, None).metrics(),
        k3_error=_ratio_error(k3_sums_B, lengths_B[filled_B]),
        empty_responses=empty,
        probs=np.exp([pi_N[shown], mu_N[shown]]),
        gaps=gap_N[shown],
        lengths=lengths_B[filled_B],
        sequence_log_ratios=log_ratios_B,
        growth=_growth(np.split(gap_N, offsets[1:-1])),
    )


def ranked(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs by their k3, smallest first; those without a finite token last."""
    return sorted(pairs, key=lambda pair: (math.isnan(pair.k3), pair.k3))


def _growth(gaps: list[np.ndarray]) -> dict[int, tuple[int, float]]:
    """Return for each prefix the number of finite sums of its gaps, and their spread, if there are at least two."""
    growth = {}
    for prefix in PREFIXES:
        sums = np.array([gap_T[:prefix].sum() for gap_T in gaps if len(gap_T) >= prefix])
        finite = sums[np.isfinite(sums)]
        if finite.size > 1:
            growth[prefix] = finite.size, float(finite.std(ddof=1))
    return growth


def _ratio_error(sums_B: np.ndarray, lengths_B: np.ndarray) -> float:
    """Return the standard error of Σ sums / Σ lengths: responses are independent, the tokens of one are not.

    With residuals eᵢ = sumᵢ - ratio·lengthᵢ it is √(B/(B - 1) Σ eᵢ²) / Σ lengths (ratio estimator, linearised).
    """
    whole = np.isfinite(sums_B)
    count, tokens = int(whole.sum()), lengths_B[whole].sum()
    if count < 2:
        return math.nan
    residuals = sums_B[whole] - sums_B[whole].sum() / tokens * lengths_B[whole]
    return float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens)


def write_figures(folder: Path, pairs: list[Pair], title: str) -> list[str]:
    """Write the figures as PNG, and return their names; `pairs` has every pair of dtypes, rollout by rollout."""
    x_label, probs = "rollout's probability", np.concatenate([pair.probs.ravel() for pair in pairs])
    shown = probs[np.isfinite(probs) & (probs > 0)]
    scale = "log" if shown.size and shown.max() > 10 * shown.min() else "linear"

    def tokens(axis: Axes, pair: Pair, colour: str) -> str:
        axis.set(xscale=scale, yscale=scale, aspect="equal")
        axis.axline((0.1, 0.1), (1, 1), **_LINE)
        axis.scatter(pair.probs[1], pair.probs[0], color=colour, **_TOKENS)
        return f"k3 {pair.k3:.1e}\n1 - Pearson {1 - pair.metric('probs_pearson'):.1e}"

    def token_gaps(axis: Axes, pair: Pair, colour: str) -> str:
        axis.set(xscale=scale)
        axis.axhline(0, **_LINE)
        axis.scatter(pair.probs[1], pair.gaps, color=colour, **_TOKENS)
        return f"mean abs {pair.metric('log_prob_gap_abs_mean'):.1e}"

    def sequences(axis: Axes, pair: Pair, colour: str) -> str:
        axis.axhline(0, **_LINE)
        axis.scatter(pair.lengths, pair.sequence_log_ratios, color=colour, **_RESPONSES)
        for side in (-1, 1):
            axis.plot([*pair.growth], [side * std for _, std in pair.growth.values()], color=INK, linewidth=0.8)
        return f"std {pair.metric('sequence_log_ratio_std'):.1e}"

    figures = {
        "tokens.png": _panels(pairs, x_label, "trainer's probability", tokens),
        "token_gaps.png": _panels(pairs, x_label, "log-prob gap of a token (nats)", token_gaps),
        "sequences.png": _panels(pairs, "response length (tokens)", "log ratio of a response (nats)", sequences),
    }
    for name, figure in figures.items():
        write_png(folder / name, figure, title)
    return list(figures)


def _panels(pairs: list[Pair], x_label: str, y_label: str, draw: Callable[[Axes, Pair, str], str]) -> Figure:
    """Draw a panel for each pair, one row for each rollout dtype; `draw` returns the note in the corner."""
    rows, columns = len({pair.rollout for pair in pairs}), len({pair.train for pair in pairs})
    figure = new_figure(3.1 * columns + 0.6, 2.7 * rows + 0.7)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, pair in zip(axes.flat, pairs, strict=True):
        note = draw(axis, pair, COLOURS[pair.rollout != pair.train])
        axis.text(0.04, 0.96, note, transform=axis.transAxes, va="top", fontsize=9)
        style(axis, title=f"rollout {pair.rollout.upper()}, train {pair.train.upper()}")
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure


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
    header, rows = growth_cells(pairs)
    tables = {
        "mismatch": markdown_table(*cells(pairs)),
        "growth": markdown_table(header, rows) if rows else [],
        "predicted": markdown_table(*prediction_cells(pairs)),
    }
    return markdown_page(__file__, versions, job=settings, prompts=prompts, **tables)


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
