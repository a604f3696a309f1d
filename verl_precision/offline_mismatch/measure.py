"""Statistics of one pair of dtypes, and a bounded number of its tokens for the figures."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_precision.errors import ConfigurationError
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.offline_mismatch.store import Store

TOKENS_SHOWN = 20_000
_CHUNK = 256  # responses in memory at a time


@dataclass(frozen=True)
class Pair:
    """One rollout dtype and one train dtype.

    Attributes:
        rollout: Dtype of vLLM.
        train: Dtype of the trainer's forward.
        metrics: `mismatch/...`, of docs/metrics.md.
        k3_error: Standard error of the k3 over responses, nats; NaN with fewer than two.
        empty_responses: Responses without a token, which count nowhere else.
        probs: [2, K] trainer's and rollout's probability of tokens chosen at random, the same ones each time.
        gaps: [K] log π - log μ of those tokens, nats.
        lengths: [B] tokens of each response.
        sequence_log_ratios: [B] Σₜ log π(yₜ) - log μ(yₜ), nats.
    """

    rollout: str
    train: str
    metrics: dict[str, float]
    k3_error: float
    empty_responses: int
    probs: np.ndarray
    gaps: np.ndarray
    lengths: np.ndarray
    sequence_log_ratios: np.ndarray

    @property
    def k3(self) -> float:
        """k3 estimate of KL(μ‖π) per token, nats; NaN without a finite token."""
        return self.metrics.get("mismatch/k3_kl", math.nan)


def measure(store: Store, rollout: str, train: str) -> Pair:
    """Return the statistics of a pair whose samples and scores are complete.

    Args:
        store: Samples and scores.
        rollout: Dtype of vLLM.
        train: Dtype of the trainer's forward.

    Raises:
        ConfigurationError: If no response has a token.
        CheckpointStateError: If scores do not belong to their samples.
    """
    statistics, generator = MismatchStatistics(), np.random.default_rng(0)
    chunks = [store.keys[start : start + _CHUNK] for start in range(0, len(store.keys), _CHUNK)]
    share = -(-TOKENS_SHOWN // len(chunks))
    empty, lengths, ratios, distances, tokens = 0, [], [], [], []
    for keys in chunks:
        lengths_B, pi_N, mu_N = store.log_probs(rollout, train, keys)
        offsets = np.concatenate([[0], np.cumsum(lengths_B)])
        pi, mu = (torch.nested.nested_tensor_from_jagged(torch.tensor(x), torch.tensor(offsets)) for x in (pi_N, mu_N))
        statistics = statistics.merge(MismatchStatistics.measure(pi, mu, None))
        filled, gap_N = lengths_B > 0, pi_N - mu_N
        starts = offsets[:-1][filled]
        empty += int((~filled).sum())
        lengths.append(lengths_B[filled])
        if starts.size:
            ratios.append(np.add.reduceat(gap_N, starts))
            distances.append(np.add.reduceat(np.expm1(gap_N) - gap_N, starts))
        chosen = generator.choice(len(pi_N), min(share, len(pi_N)), replace=False)
        tokens.append(np.stack([pi_N[chosen], mu_N[chosen]]))
    if empty == len(store.keys):
        raise ConfigurationError(
            f"all {empty} responses sampled in {rollout} are empty: there is nothing to compare. The model ends at "
            "once; allowed are prompts that it answers. Check --prompts and the model's chat template."
        )
    log_probs, lengths_B = np.concatenate(tokens, axis=1), np.concatenate(lengths)
    return Pair(
        rollout=rollout,
        train=train,
        metrics=statistics.metrics(),
        k3_error=_ratio_error(np.concatenate(distances), lengths_B),
        empty_responses=empty,
        probs=np.exp(log_probs),
        gaps=log_probs[0] - log_probs[1],
        lengths=lengths_B,
        sequence_log_ratios=np.concatenate(ratios),
    )


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
