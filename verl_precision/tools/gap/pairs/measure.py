"""Statistics of one pair of dtypes, and a bounded number of its tokens for the figures."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.tools.jobs.job import Store

TOKENS_SHOWN = 20_000
PREFIXES = tuple(2**power for power in range(6, 16))  # lengths at which the spread of log ratios is measured


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
