"""The canary compares log-probs of fixed sequences, as the rollout serves them, with the trainer's. Pure torch.

After a sync each replica and the trainer score a few fixed token sequences. The test works for every storage format of
the weights. The test finds every fault that moves log-probs by more than the rounding of the two dtypes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

CANARY_GAP, CANARY_BOUND = "weight_sync/canary_gap", "weight_sync/canary_bound"

# Gaps are judged in units of ε·(1 + mean |log π|), with ε of the coarsest grid on the way. Rounding errors of logits
# grow with the logits, so a policy with little entropy has a larger healthy gap.
# Measured healthy gaps (docs/weight_sync.md): 0.02 to 2.3 units.
FIRST_LIMIT = 16.0  # until the bound has been learned; only another model has such a gap
LEARNING_SYNCS = 5
FLOOR, FACTOR = 4.0, 10.0  # smallest learned bound; learned bound / largest gap of the first healthy syncs
# A lower bound, used if most tokens have a larger gap than ever: rounding sends only a few to another expert.
NEAR_FLOOR, NEAR_FACTOR = 0.1, 6.0  # the same two for all healthy syncs, since a policy's gap grows in training
MOST_FACTOR = 3.0  # median gap of the tokens / largest median of all healthy syncs
TF32_EPS = 2.0**-10  # the same as FP16's
# On a grid of 8 or 4 bits, 16 units exceed the gap between two unrelated models. So a bound is at most this
# share of 1 + mean |log π|, but at least one unit. Correct FP8 rollouts, from four random models with blocks of
# 128, had gaps of up to 0.47 units of e4m3, a share of 0.06.
LARGEST_SHARE = 0.15
E4M3_EPS, E5M2_EPS, FOUR_BITS_EPS = 2.0**-3, 2.0**-2, 2.0**-1
NOTICEABLE = 0.5  # rounding in another batch moves log-probs by less
ALONE = 2.0  # the same if no other replica has moved: more than any healthy gap


@dataclass(frozen=True)
class CanaryVerdict:
    """The canary's verdict on one sync."""

    gap: float  # of the worst replica: trimmed mean |log π − log μ|, nats; inf for non-finite answers
    bound: float  # upper limit of a healthy gap, nats
    problems: tuple[str, ...]  # one sentence each; empty if all replicas are healthy

    def metrics(self) -> dict[str, float]:
        """Return gap and bound as metrics."""
        return {CANARY_GAP: self.gap, CANARY_BOUND: self.bound}


def canary_tokens(vocabulary: int, excluded: Collection[int], sequences: int, tokens: int) -> Tensor:
    """Return the fixed sequences, int64 [S, T], of ordinary tokens; always the same sequences."""
    ordinary = torch.tensor(sorted(set(range(vocabulary)).difference(excluded)))
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (sequences, tokens), generator=generator)]


def grid_eps(name: str) -> float:
    """Return ε of a quantisation of weights or cache, given vLLM's name of it.

    An integer grid of 8 bits counts as e4m3, whose relative error for weights is the larger one. If a name does not
    contain the bits (`torchao`, `compressed-tensors`, `awq`), four are assumed.
    """
    if "e5m2" in name:
        return E5M2_EPS
    return E4M3_EPS if any(eight in name for eight in ("fp8", "int8")) else FOUR_BITS_EPS


@dataclass
class CanaryJudge:
    """Compares the answers after each sync, and learns the size of a healthy gap from healthy syncs."""

    train_dtype: torch.dtype  # of the trainer's forward
    rollout_dtype: torch.dtype
    tf32: bool = False  # on an NVIDIA GPU vLLM's attention multiplies FP32 numbers in TF32
    grids: Collection[str] = ()  # vLLM's names of the grids below 16 bits, of weights and of the cache
    # For each healthy sync, in units: the gap and the median over the tokens, each of its worst replica.
    _healthy: list[tuple[float, float]] = field(default_factory=list)
    # Replica -> (log π, log μ) of the sync that last changed the replica's answers.
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def judge(self, trainer: Mapping[int, Tensor], replicas: Mapping[int, Tensor]) -> CanaryVerdict:
        """Judge one sync by log π and log μ of each replica's tokens, [S, T - 1], and learn from it."""
        now = {rank: (trainer[rank].double(), answer.double()) for rank, answer in replicas.items()}
        gaps = {rank: _trimmed_gap(*log_probs) for rank, log_probs in now.items()}
        dtypes = (torch.finfo(dtype).eps for dtype in (self.train_dtype, self.rollout_dtype))
        eps = max(*dtypes, *map(grid_eps, self.grids), self.tf32 * TF32_EPS)
        unit = eps * (1.0 + float(torch.stack([own for own, _ in now.values()]).abs().mean()))
        medians = {rank: float((own - answer).abs().median()) / unit for rank, (own, answer) in now.items()}
        bounds = {rank: self._limit(median, max(LARGEST_SHARE / eps, 1.0)) * unit for rank, median in medians.items()}
        worst = max(gaps, key=lambda rank: gaps[rank] / bounds[rank])
        problems = [
            f"replica {rank}: its served log-probs differ from the trainer's by {gap:.3g} nats a token on average; in "
            f"good health they differ by less than {bounds[rank]:.3g}"
            for rank, gap in gaps.items()
            if not gap < bounds[rank]
        ]
        problems += self._stale(now, unit)
        if not problems:
            self._healthy.append((max(gaps.values()) / unit, max(medians.values())))
        return CanaryVerdict(gaps[worst], bounds[worst], tuple(problems))

    def _limit(self, median: float, largest: float) -> float:
        """Return the bound in units for a replica with this median gap of its tokens."""
        if len(self._healthy) < LEARNING_SYNCS:
            return min(FIRST_LIMIT, largest)
        gaps, medians = zip(*self._healthy, strict=True)
        limit = min(FIRST_LIMIT, largest, max(FLOOR, FACTOR * max(gaps[:LEARNING_SYNCS])))
        return min(limit, max(NEAR_FLOOR, NEAR_FACTOR * max(gaps))) if median > MOST_FACTOR * max(medians) else limit

    def _stale(self, now: Mapping[int, tuple[Tensor, Tensor]], unit: float) -> list[str]:
        """Return a line for each replica whose answers stay equal, bit for bit, while the trainer's log-probs move."""
        before = {rank: self._before[rank] for rank in sorted(self._before.keys() & now.keys())}
        same = [rank for rank, (_, answer) in before.items() if torch.equal(now[rank][1], answer)]
        trainer = {rank: _trimmed_gap(now[rank][0], before[rank][0]) for rank in same}
        others = max((_trimmed_gap(now[rank][1], before[rank][1]) for rank in before if rank not in same), default=0.0)
        self._before = {rank: self._before[rank] if rank in same else now[rank] for rank in now}
        least = (NOTICEABLE if others > NOTICEABLE * unit else ALONE) * unit
        return [
            f"replica {rank}: its log-probs did not change at all, while the trainer's log-probs moved by "
            f"{moved:.3g} nats a token: it is stale"
            for rank, moved in trainer.items()
            if moved > least
        ]


def _trimmed_gap(a: Tensor, b: Tensor) -> float:
    """Return the mean |a − b| over the nine tenths of the tokens where it is smallest; inf if any is not finite."""
    # In a mixture of experts, rounding sends one token in hundreds to another expert. A wrong sync changes more.
    gaps = (a - b).abs().flatten()
    if not gaps.isfinite().all():
        return math.inf
    return float(gaps.sort().values[: gaps.numel() - gaps.numel() // 10].mean())
