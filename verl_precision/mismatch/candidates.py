"""Which responses of a step a run keeps: chosen from micro-batches, ranks and updates, which merge.

Of N = `mismatch.keep_tokens` responses a step, ⌈N/3⌉ are those of the largest |log-weight|, ⌈(N - ⌈N/3⌉)/2⌉ of the
others those of the largest single gap, and the rest is drawn by lot from what is left: 6, 5 and 5 of 16. A lot is a
hash of step and identity, so that a step that is done again draws the same. Ties are broken by lot.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import Self

REASONS = ("largest weight", "largest gap", "random")


def lot_of(step: int, identity: str) -> int:
    """Return a response's lot in a step, which also tells it from the others: 56 bits."""
    return int.from_bytes(hashlib.blake2b(f"{step} {identity}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Candidate:
    """A response that may be kept, with what only the worker may have."""

    lot: int
    log_weight: float  # Σₜ log π - log μ over the policy's tokens
    largest_gap: float  # largest |log π - log μ| of one of them; infinite where one is NaN
    log_probs: Tensor  # [T] float32, log π
    shadow_log_probs: Tensor | None  # [T] float32


def _size(number: float) -> float:
    return float("inf") if number != number else abs(number)


# One for each of `REASONS`: by what a candidate is chosen, the largest first.
_RANKS: tuple[Callable[[Candidate], tuple[float, int]], ...] = (
    lambda one: (-_size(one.log_weight), one.lot),
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
    """The responses of a piece of a step that the whole may keep; mergeable, whatever the cut.

    A response of each share may have been taken by the shares before it, so as many more are candidates.
    """

    keep: int
    found: Mapping[int, Candidate] = field(default_factory=dict)  # by lot

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        keep: int,
        lots: Sequence[int],
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        shadow_log_probs: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Self:
        """Choose from a batch, or a part of one.

        Args:
            keep: N.
            lots: Of each response; negative: it is padding, and never chosen.
            trainer_log_probs: [B, T] floating, log π in nats, or nested (torch.jagged).
            rollout_log_probs: Likewise, log μ.
            response_mask: Likewise, nonzero where the policy wrote the token; what masked tokens hold never matters.
            shadow_log_probs: As the trainer's.
            lengths: Tokens of each response, where they are padded.

        Returns:
            The candidates, on the CPU. A response without a token of the policy is none.
        """
        flat = [
            each.values() if each.is_nested else each.reshape(-1) for each in (trainer_log_probs, rollout_log_probs)
        ]
        mask_N = (response_mask.values() if response_mask.is_nested else response_mask.reshape(-1)).bool()
        if trainer_log_probs.is_nested:
            widths_B = trainer_log_probs.offsets().diff()  # type: ignore[attr-defined]
        else:
            widths_B = mask_N.new_full((len(lots),), trainer_log_probs.shape[1], dtype=torch.int64)
        gap_N = torch.where(mask_N, flat[0].double() - flat[1], 0)
        size_N = gap_N.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        totals_B, largest_B, counts_B = (
            torch.segment_reduce(values, how, lengths=widths_B, initial=0).tolist()
            for values, how in ((gap_N, "sum"), (size_N, "max"), (mask_N.double(), "sum"))
        )
        nothing = torch.zeros(0)
        known = {
            row: Candidate(lots[row], totals_B[row], largest_B[row], nothing, None)
            for row, count in enumerate(counts_B)
            if count and lots[row] >= 0
        }
        rows = {one.lot: row for row, one in known.items()}
        chosen = _best(keep, known.values())

        def tokens(batch: Tensor, row: int) -> Tensor:
            length = None if lengths is None else lengths[row]
            return batch[row][:length].float().cpu().clone()

        found = {}
        for lot, one in chosen.items():
            shadow = None if shadow_log_probs is None else tokens(shadow_log_probs, rows[lot])
            log_probs = tokens(trainer_log_probs, rows[lot])
            found[lot] = dataclasses.replace(one, log_probs=log_probs, shadow_log_probs=shadow)
        return cls(keep, found)

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
