"""Statistics of one pair of dtypes, and a bounded number of its tokens for the figures."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_precision.base.errors import ConfigurationError
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.tools.jobs.store import Store

TOKENS_SHOWN = 20_000
_CHUNK = 256  # responses in memory at a time


@dataclass(frozen=True, eq=False)
class Pair:
    """One rollout dtype (of vLLM) and one train dtype (of the trainer's forward)."""

    rollout: str
    train: str
    metrics: dict[str, float]  # `mismatch/...`, of docs/metrics.md
    k3_error: float  # standard error of the k3 over responses, nats; NaN with fewer than two
    empty_responses: int  # responses without a token, which count nowhere else
    probs: np.ndarray  # [2, K] trainer's and rollout's probability of tokens chosen at random, the same ones each time
    gaps: np.ndarray  # [K] log π - log μ of those tokens, nats
    lengths: np.ndarray  # [B] tokens of each response
    sequence_log_ratios: np.ndarray  # [B] Σₜ log π(yₜ) - log μ(yₜ), nats

    def metric(self, name: str) -> float:
        """Return the metric `mismatch/<name>`; NaN where it is not defined."""
        return self.metrics.get(f"mismatch/{name}", math.nan)

    @property
    def k3(self) -> float:
        """k3 estimate of KL(μ‖π) per token, nats; NaN without a finite token."""
        return self.metric("k3_kl")


def measure(store: Store, rollout: str, train: str) -> Pair:
    """Return the statistics of a pair whose samples and scores are complete."""
    statistics, generator = MismatchStatistics(), np.random.default_rng(0)
    chunks = [store.keys[start : start + _CHUNK] for start in range(0, len(store.keys), _CHUNK)]
    share = -(-TOKENS_SHOWN // len(chunks))
    lengths, sums, tokens = [], [], []
    for keys in chunks:
        lengths_B, pi_N, mu_N = store.log_probs(rollout, train, keys)
        offsets = np.concatenate([[0], np.cumsum(lengths_B)])
        pi, mu = (torch.nested.nested_tensor_from_jagged(torch.tensor(x), torch.tensor(offsets)) for x in (pi_N, mu_N))
        statistics = statistics.merge(MismatchStatistics.measure(pi, mu, None))
        gap_N = pi_N - mu_N
        starts = offsets[:-1][lengths_B > 0]
        lengths.append(lengths_B[lengths_B > 0])
        if starts.size:
            sums.append(np.add.reduceat([gap_N, np.expm1(gap_N) - gap_N], starts, axis=1))
        chosen = generator.choice(len(pi_N), min(share, len(pi_N)), replace=False)
        tokens.append(np.stack([pi_N[chosen], mu_N[chosen]]))
    log_probs, lengths_B = np.concatenate(tokens, axis=1), np.concatenate(lengths)
    empty = len(store.keys) - len(lengths_B)
    if not len(lengths_B):
        problem = f"all {empty} responses sampled in {rollout} are empty: the model ends at once"
        remedy = "Check --prompts and the model's chat template."
        raise ConfigurationError(problem, allowed="prompts that it answers", remedy=remedy)
    log_ratios_B, k3_sums_B = np.concatenate(sums, axis=1)
    probs, gaps, error = np.exp(log_probs), log_probs[0] - log_probs[1], _ratio_error(k3_sums_B, lengths_B)
    return Pair(rollout, train, statistics.metrics(), error, empty, probs, gaps, lengths_B, log_ratios_B)


def ranked(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs by their k3, smallest first; those without a finite token last."""
    return sorted(pairs, key=lambda pair: (math.isnan(pair.k3), pair.k3))


def _ratio_error(sums_B: np.ndarray, lengths_B: np.ndarray) -> float:
    """Return the standard error of Σ sums / Σ lengths: tokens of one response are not independent, responses are.

    With residuals eᵢ = sumᵢ - ratio·lengthᵢ it is √(B/(B - 1) Σ eᵢ²) / Σ lengths (ratio estimator, linearised).
    """
    whole = np.isfinite(sums_B)
    count, tokens = int(whole.sum()), lengths_B[whole].sum()
    if count < 2:
        return math.nan
    residuals = sums_B[whole] - sums_B[whole].sum() / tokens * lengths_B[whole]
    return float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens)
