"""Statistics of one pair of dtypes, from what its files hold; and a bounded number of tokens to draw."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_precision.errors import CheckpointStateError, ConfigurationError
from verl_precision.mismatch.statistics import MismatchSums
from verl_precision.offline.store import Store

TOKENS_DRAWN = 20_000


@dataclass(frozen=True)
class Pair:
    """One rollout dtype and one train dtype.

    Attributes:
        rollout: dtype of vLLM.
        train: dtype of the trainer's forward.
        metrics: `mismatch/...`, of docs/metrics.md.
        k3_error: standard error of the k3 over responses, nats; NaN with fewer than two.
        empty_responses: responses without a token, which count nowhere else.
        probs: [2, K] trainer's and rollout's probability of tokens drawn at random, the same ones each time.
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
        store: the analysis.
        rollout: dtype of vLLM.
        train: dtype of the trainer's forward.

    Raises:
        ConfigurationError: if no response has a token.
        CheckpointStateError: if a file of scores does not belong to its samples.
    """
    sums = MismatchSums()
    drawing = np.random.default_rng(0)
    share = -(-TOKENS_DRAWN // len(store.shards))
    empty, lengths, ratios, distances, tokens = 0, [], [], [], []
    for shard in range(len(store.shards)):
        lengths_B, pi_N, mu_N = read_shard(store, rollout, train, shard)
        offsets = np.concatenate([[0], np.cumsum(lengths_B)])
        pi, mu = (torch.nested.nested_tensor_from_jagged(torch.tensor(x), torch.tensor(offsets)) for x in (pi_N, mu_N))
        sums.update(pi, mu, None)
        filled, gap_N = lengths_B > 0, pi_N - mu_N
        starts = offsets[:-1][filled]
        empty += int((~filled).sum())
        lengths.append(lengths_B[filled])
        if starts.size:
            ratios.append(np.add.reduceat(gap_N, starts))
            distances.append(np.add.reduceat(np.expm1(gap_N) - gap_N, starts))
        drawn = drawing.choice(len(pi_N), min(share, len(pi_N)), replace=False)
        tokens.append(np.stack([pi_N[drawn], mu_N[drawn]]))
    if empty == store.total_responses:
        raise ConfigurationError(
            f"all {empty} responses sampled in {rollout} are empty: there is nothing to compare. The model ends at "
            "once; allowed are prompts that it answers. Check --prompts and the model's chat template."
        )
    log_probs, lengths_B = np.concatenate(tokens, axis=1), np.concatenate(lengths)
    return Pair(
        rollout=rollout,
        train=train,
        metrics=sums.metrics(),
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


def read_shard(store: Store, rollout: str, train: str, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a shard's log-probs, response after response, in float64.

    Args:
        store: the analysis.
        rollout: dtype of vLLM.
        train: dtype of the trainer's forward.
        shard: its number.

    Returns:
        lengths [B], log π [N], log μ [N], with N = Σ lengths.

    Raises:
        CheckpointStateError: if the scores do not belong to the samples.
    """
    files = store.sample_file(rollout, shard), store.score_file(train, rollout, shard)
    (responses, lengths, mu), (scored, scored_lengths, pi) = (
        _log_probs(file, column) for file, column in zip(files, ("rollout_log_probs", "trainer_log_probs"), strict=True)
    )
    if not (np.array_equal(responses, scored) and np.array_equal(lengths, scored_lengths)):
        raise CheckpointStateError(
            f"{files[1]} has scores of other responses than {files[0]}. Allowed: files that one run wrote. Delete the "
            "first and repeat the command, which scores again."
        )
    return lengths, pi, mu


def _log_probs(file, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from pyarrow import float64, parquet

    table = parquet.read_table(file, columns=["response", column], partitioning=None).combine_chunks()
    lists = table.column(column).combine_chunks()
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.flatten().cast(float64()).to_numpy(zero_copy_only=False)
    return table.column("response").to_numpy(), lengths, values
