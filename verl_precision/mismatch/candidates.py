"""Chooses the responses of a step that a run keeps; candidates of micro-batches, ranks and updates merge.

A step keeps N = `mismatch.keep_tokens` responses: the ⌈N/3⌉ with the largest |log-weight|, then ⌈(N - ⌈N/3⌉)/2⌉ of the
others with the largest single gap, then the rest by lot: 6, 5 and 5 of 16. A lot is a hash of step and identity, so
that a repeated step chooses the same responses. Ties are broken by lot.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from verl_precision.mismatch.packing import FlatBatch

REASONS = ("largest weight", "largest gap", "random")


def lot_of(step: int, identity: str) -> int:
    """Return a response's lot in a step, 56 bits, which also identifies the response."""
    return int.from_bytes(hashlib.blake2b(f"{step} {identity}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Candidate:
    """A response that may be kept, with data that perhaps only the worker has."""

    lot: int
    log_weight: float  # Σₜ log π - log μ over the policy's tokens
    largest_gap: float  # largest |log π - log μ| of one token; infinite if one is NaN
    log_probs: Tensor  # [T] float32, log π
    shadow_log_probs: Tensor | None  # [T] float32

    def copied(self) -> "Candidate":
        """Return the candidate with its own copy of the log-probs, on the CPU."""
        shadow = None if self.shadow_log_probs is None else self.shadow_log_probs.float().cpu().clone()
        return replace(self, log_probs=self.log_probs.float().cpu().clone(), shadow_log_probs=shadow)


# A sort key for each of `REASONS`, smallest first; a weight of NaN comes before all others.
_RANKS: tuple[Callable[[Candidate], tuple[float, int]], ...] = (
    lambda one: (-math.inf if math.isnan(one.log_weight) else -abs(one.log_weight), one.lot),
    lambda one: (-one.largest_gap, one.lot),
    lambda one: (0.0, one.lot),
)


def shares_of(keep: int) -> tuple[int, int, int]:
    """Return how many responses are kept for each of `REASONS`."""
    weight = -(-keep // 3)
    gap = -(-(keep - weight) // 2)
    return weight, gap, keep - weight - gap


@dataclass(frozen=True)
class Candidates:
    """The responses of a piece of a step that the whole step may keep; mergeable for every split.

    Earlier shares may take the responses of a later share, so each share has as many more candidates.
    """

    keep: int
    found: Mapping[int, Candidate] = field(default_factory=dict)  # by lot

    @classmethod
    @torch.no_grad()
    def of_batch(cls, keep: int, lots: Sequence[int], batch: FlatBatch, lengths: Sequence[int] | None = None) -> Self:
        """Return the candidates of a batch, or of a part of one: responses with at least one token of the policy.

        Log-probs are the trainer's, a shadow's if there is one, and the rollout's. The mask is nonzero where the policy
        wrote the token; other tokens have no effect. A negative lot means padding. `lengths` are the tokens of each
        response, if responses are padded.
        """
        (trainer_N, *shadow, rollout_N), bounds, known = batch.log_probs, batch.offsets.tolist(), []
        for row, (lot, begin, end) in enumerate(zip(lots, bounds[:-1], bounds[1:], strict=True)):
            written = begin + batch.mask[begin:end].nonzero().squeeze(1)
            gap = trainer_N[written].double() - rollout_N[written]
            if len(gap) and lot >= 0:
                largest = gap.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max()
                whole = slice(begin, end if lengths is None else begin + lengths[row])
                of_shadow = shadow[0][whole] if shadow else None
                known.append(Candidate(lot, float(gap.sum()), float(largest), trainer_N[whole], of_shadow))
        return cls(keep, {lot: one.copied() for lot, one in _best(keep, known).items()})

    def merge(self, other: Self) -> Self:
        """Return the candidates of both pieces together; neither changes."""
        return type(self)(self.keep, _best(self.keep, {**self.found, **other.found}.values()))

    def chosen(self) -> list[tuple[Candidate, str]]:
        """Return the responses to keep, with the reason for each, one of `REASONS`."""
        left, taken = dict(self.found), []
        for reason, rank, share in zip(REASONS, _RANKS, shares_of(self.keep), strict=True):
            for one in sorted(left.values(), key=rank)[:share]:
                taken.append((left.pop(one.lot), reason))
        return taken


def _best(keep: int, candidates: Iterable[Candidate]) -> dict[int, Candidate]:
    candidates, taken = list(candidates), 0
    found: dict[int, Candidate] = {}
    for rank, share in zip(_RANKS, shares_of(keep), strict=True):
        taken += share
        found |= {one.lot: one for one in sorted(candidates, key=rank)[: taken if share else 0]}
    return found
