"""The canary: do the served log-probs say that the rollout has the trainer's weights? Pure torch.

A few fixed token sequences are scored by every rollout replica, after a sync, through the path that serves requests,
and by the trainer with the weights that it sent. The comparison does not depend on how an engine lays out its weights,
so it sees what bits cannot: CUDA graphs, quantised weights, LoRA adapters, delta syncs, one stale replica of many. In
exchange it sees only what moves log-probs by more than the two dtypes do by themselves.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

CANARY_GAP, CANARY_BOUND = "weight_sync/canary_gap", "weight_sync/canary_bound"

# Gaps are judged in units of ε·(1 + mean |log π|): rounding errors of logits grow with the logits, so that a policy
# which narrows has a larger gap in the same good health. ε is that of the coarser of the two dtypes.
# Measured in good health (docs/weight_sync.md): 0.02 to 1.5 units.
FIRST_LIMIT = 16.0  # before the bound has been learned: only another model is that far away
FLOOR = 4.0  # the learned bound never falls below it: a policy that gets rougher in training is no wrong sync
FACTOR = 10.0  # the learned bound over the largest gap of the first healthy syncs
LEARNING_SYNCS = 5
NOTICEABLE = 0.5  # log-probs that move by more have not moved through the rounding of another batch alone


@dataclass(frozen=True)
class CanaryVerdict:
    """What the canary says of one sync.

    Attributes:
        gap: largest mean |log π − log μ| of any replica, over the nine tenths of the canary's tokens where it is
            smallest, nats; inf for non-finite answers.
        bound: what a healthy gap stays below, nats.
        problems: one sentence a replica that is not in good health; empty when all are.
    """

    gap: float
    bound: float
    problems: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return gap and bound as metrics."""
        return {CANARY_GAP: self.gap, CANARY_BOUND: self.bound}


def canary_tokens(vocabulary: int, excluded: Collection[int], sequences: int, tokens: int) -> Tensor:
    """Draw the fixed sequences: uniform over the ordinary tokens, the same in every run and every process.

    Args:
        vocabulary: number of token ids.
        excluded: ids with a meaning to the engines (end of sequence, image placeholders, ...).
        sequences: S ≥ 1.
        tokens: T ≥ 2, the first of which is only a condition.

    Returns:
        int64 [S, T].
    """
    excluded = set(excluded)
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in excluded])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (sequences, tokens), generator=generator)]


@dataclass
class CanaryJudge:
    """Compares the answers of each sync, and learns from the first healthy ones what a healthy gap is.

    Attributes:
        train_dtype: in which the trainer's forward computes.
        rollout_dtype: in which the rollout's model computes.
    """

    train_dtype: torch.dtype
    rollout_dtype: torch.dtype
    _healthy: list[float] = field(default_factory=list)
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the trainer's and the replica's

    def judge(self, trainer: Mapping[int, Tensor], replicas: Mapping[int, Tensor]) -> CanaryVerdict:
        """Judge one sync.

        Args:
            trainer: replica rank -> log π of the tokens that this replica scored, float32 [S, T - 1], nats.
            replicas: replica rank -> log μ of the same tokens, likewise; at least one.

        Returns:
            The verdict. A healthy sync also teaches the bound, until five have.
        """
        own = {rank: trainer[rank].double() for rank in replicas}
        gaps = {rank: _trimmed_gap(answer.double(), own[rank]) for rank, answer in replicas.items()}
        unit = self._eps * (1.0 + float(torch.stack(list(own.values())).abs().mean()))
        worst = max(gaps.values())
        bound = self._limit() * unit
        problems = [
            f"replica {rank}: its served log-probs differ from the trainer's by {gap:.3g} nats a token on average; in "
            f"good health they differ by less than {bound:.3g}"
            for rank, gap in gaps.items()
            if not gap < bound
        ]
        now = {rank: (own[rank], answer.double()) for rank, answer in replicas.items()}
        problems += self._stale(now, NOTICEABLE * unit)
        self._before = now
        if not problems and len(self._healthy) < LEARNING_SYNCS:
            self._healthy.append(worst / unit)
        return CanaryVerdict(worst, bound, tuple(problems))

    @property
    def _eps(self) -> float:
        return max(torch.finfo(self.train_dtype).eps, torch.finfo(self.rollout_dtype).eps)

    def _limit(self) -> float:
        if len(self._healthy) < LEARNING_SYNCS:
            return FIRST_LIMIT
        return min(FIRST_LIMIT, max(FLOOR, FACTOR * max(self._healthy)))

    def _stale(self, now: Mapping[int, tuple[Tensor, Tensor]], noticeable: float) -> list[str]:
        """Name replicas that have not moved by one bit while the trainer and other replicas have moved."""
        moves = {
            rank: [_trimmed_gap(new, old) for new, old in zip(now[rank], self._before[rank], strict=True)]
            for rank in self._before.keys() & now.keys()
        }
        largest = max((moved for _, moved in moves.values()), default=0.0)
        if largest <= noticeable:
            return []
        return [
            f"replica {rank}: it answers as before this sync, to the last bit, while other replicas' log-probs moved "
            f"by {largest:.3g} nats a token: it is stale"
            for rank, (trainer_moved, moved) in sorted(moves.items())
            if moved == 0.0 and trainer_moved > noticeable
        ]


def _trimmed_gap(a: Tensor, b: Tensor) -> float:
    """Return the mean |a − b| of the nine tenths of the tokens where it is smallest; inf if any is not finite.

    In a mixture of experts one token in hundreds is routed to another expert for a rounding error, in good health. A
    wrong sync changes all tokens, or those of an expert.
    """
    gaps = (a - b).abs().flatten()
    if not gaps.isfinite().all():
        return math.inf
    return float(gaps.sort().values[: gaps.numel() - gaps.numel() // 10].mean())
