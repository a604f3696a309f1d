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
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.statistics import MismatchStatistics

# This turn and all later ones are measured together.
FURTHEST = 8


def turns_of(mask_N: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] int64, the number, from 1, of the turn in which the policy wrote each token; 0: it did not.

    The mask is of flat responses, which begin at `offsets` ([B + 1]), and nonzero where the policy wrote the token.
    """
    mask_N, lengths_B = mask_N.bool(), offsets.diff()
    begins_N = mask_N.clone()
    begins_N[1:] &= ~mask_N[:-1]
    first_E = offsets[:-1][lengths_B > 0]
    begins_N[first_E] = mask_N[first_E]
    counted = torch.cat([begins_N.new_zeros(1, dtype=torch.int64), begins_N.cumsum(0)])
    return (counted[1:] - counted[offsets[:-1]].repeat_interleave(lengths_B)) * mask_N


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
        log_probs = {"trainer_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
        batch = flattened(log_probs, response_mask, None)
        turns_N = turns_of(batch.mask, batch.offsets)
        written, most = turns_N.count_nonzero().double().cpu(), int(turns_N.max()) if len(turns_N) else 0
        tokens = torch.tensor(float(len(turns_N))) if lengths is None else lengths.sum().double().cpu()
        found: dict[str, Statistic] = {
            TURNS_MAX: Maximum(torch.tensor(float(most))),
            TOOL_FRACTION: Mean(tokens - written, tokens),
        }
        for turn in range(1, min(most, FURTHEST) + 1):
            if most > 1:
                of_turn_N = turns_N == turn if turn < FURTHEST else turns_N >= turn
                whole = MismatchStatistics.of_batch(batch._replace(mask=of_turn_N))
            found |= {of_turn(turn, name): statistic for name, statistic in whole.totals(BY_VERSION).items()}
        return cls.on_cpu(found)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        found = super().metrics()
        return found if found.get(TURNS_MAX, 0) > 1 else {}
