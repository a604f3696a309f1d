"""The mismatch by turn of an agent loop. Tool output is the policy's input, not its own: it is never counted.

A turn is a maximal run of tokens that the policy wrote, as the response mask tells.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.base.mergeable import Maximum, Mean, Statistic, StatisticSet
from verl_precision.mismatch.metric_names import BY_VERSION, TOOL_FRACTION, TURNS_MAX, of_turn
from verl_precision.mismatch.packing import like
from verl_precision.mismatch.statistics import MismatchStatistics

# This turn and all later ones are measured together.
FURTHEST = 8


def turns_of(response_mask: Tensor) -> Tensor:
    """Return the number, from 1, of the turn in which the policy wrote each token; 0: it did not.

    The mask is [B, T], [T], or nested (torch.jagged), nonzero where the policy wrote the token; the result is int64, of
    its shape and layout.
    """
    if response_mask.is_nested:
        rows = [turns_of(row) for row in response_mask.unbind()]
        return like(response_mask, torch.cat(rows))
    mask = response_mask.bool()
    begins = mask.clone()
    begins[..., 1:] &= ~mask[..., :-1]
    return begins.cumsum(-1) * mask


@dataclass(frozen=True)
class MismatchByTurn(StatisticSet):
    """The metrics `mismatch/turn_<k>/...`, mergeable; none where no response has a second turn."""

    prefix: ClassVar[str] = ""

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        whole: MismatchStatistics,
        lengths: Tensor | None = None,
    ) -> Self:
        """Measure a batch, or a part of one, of tensors as `MismatchStatistics.measure` takes them.

        `whole` are its statistics, which are those of turn 1 where there is no other. `lengths` is [B], the tokens of
        each response where they are padded, tool output included. Padding and tool output never matter, whatever they
        hold.
        """
        turns = turns_of(response_mask)
        values = turns.values() if turns.is_nested else turns
        written, most = values.count_nonzero().double().cpu(), int(values.max()) if values.numel() else 0
        tokens = torch.tensor(float(values.numel())) if lengths is None else lengths.sum().double().cpu()
        found: dict[str, Statistic] = {
            TURNS_MAX: Maximum(torch.tensor(float(most))),
            TOOL_FRACTION: Mean(tokens - written, tokens),
        }
        for turn in range(1, min(most, FURTHEST) + 1):
            if most > 1:
                of_turn_N = like(turns, values == turn if turn < FURTHEST else values >= turn)
                whole = MismatchStatistics.measure(trainer_log_probs, rollout_log_probs, of_turn_N)
            found |= {of_turn(turn, name): statistic for name, statistic in whole.totals(BY_VERSION).items()}
        return cls.on_cpu(found)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        found = super().metrics()
        return found if found.get(TURNS_MAX, 0) > 1 else {}
