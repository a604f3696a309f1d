"""The mismatch of parts of a batch: by age of the weights that sampled a response, and by turn.

A response of the current version was sampled with the weights that the trainer scores it with, so its gap comes from
precision alone. In asynchronous training other responses are older, and their gap also contains the policy's change. A
turn of an agent loop is a maximal run of tokens that the policy wrote, by the response mask, without tool output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from verl_precision.base.mergeable import Count, Maximum, Mean, Statistic, StatisticSet, merge_by_name
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.metric_names import BY_VERSION, STALE_FRACTION, TOOL_FRACTION, TURNS_MAX, behind, of_turn
from verl_precision.mismatch.packing import FlatBatch
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.statistics import MismatchStatistics

# Responses this many or more versions behind are measured together, and so are this turn and all later turns.
FURTHEST_VERSION, FURTHEST_TURN = 3, 8
ENGINES = "nonfinite_trainer_tokens", "nonfinite_rollout_tokens"


@dataclass(frozen=True)
class MismatchByVersion:
    """All `mismatch/...` metrics, mergeable."""

    # versions behind, 0 to `FURTHEST_VERSION` -> the statistics of these responses
    groups: Mapping[int, MismatchStatistics] = field(default_factory=dict)

    @classmethod
    def of_batch(cls, batch: FlatBatch, versions_behind: Sequence[int]) -> Self:
        """Measure a batch, or a part of one, of the trainer's and the rollout's log-probs.

        `versions_behind` has a number for each response; 0: sampled with the weights that the trainer scores it with.
        """
        found = {}
        groups_B = torch.tensor(versions_behind, dtype=torch.int64).clamp(max=FURTHEST_VERSION)
        for group in groups_B.unique().tolist():
            part = batch.only(groups_B == group)
            measured = MismatchStatistics.of_batch(part)
            counts = dict.fromkeys(ENGINES, measured.statistics["nonfinite_tokens"])
            if counts[ENGINES[0]].value():  # only then find the engine that gave them
                broken = (~each.isfinite() & part.mask.bool() for each in part.log_probs)
                counts = {name: Count(tokens.sum()).on_cpu() for name, tokens in zip(ENGINES, broken, strict=True)}
            found[group] = MismatchStatistics({**measured.statistics, **counts})
        return cls(found)

    def merge(self, other: Self) -> Self:
        """Return the statistics of both pieces together; neither changes."""
        return type(self)(merge_by_name([self.groups, other.groups]))

    @property
    def whole(self) -> MismatchStatistics:
        """The statistics of all responses."""
        return MismatchStatistics(merge_by_name(group.statistics for group in self.groups.values()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all responses; if some responses are not current, also those of each version behind."""
        found = self.whole.metrics()
        groups = {group: statistics.metrics() for group, statistics in self.groups.items()}
        tokens = {group: metrics["mismatch/tokens"] for group, metrics in groups.items() if metrics["mismatch/tokens"]}
        if tokens:
            found[STALE_FRACTION] = 1 - tokens.get(0, 0.0) / sum(tokens.values())
        for group in tokens if set(tokens) != {0} else ():
            found |= {behind(group, name): groups[group][name] for name in BY_VERSION}
        return found


def beta_of_current_version(
    batch: FlatBatch, versions_behind: Sequence[int], clip: ClipRange | None
) -> PhantomStatistics:
    """Measure the responses of the current version with the rollout as shadow: alpha is 0, and the gap is beta.

    Batch and `versions_behind` are as `MismatchByVersion.of_batch` takes them; `clip` is that of `PhantomStatistics`.
    """
    current_B = torch.tensor(versions_behind) == 0
    if not current_B.any():
        return PhantomStatistics()
    trainer, rollout = batch.log_probs
    return PhantomStatistics.of_batch(batch.only(current_B)._replace(log_probs=(trainer, rollout, rollout)), clip)


def turns_of(mask_N: Tensor, offsets: Tensor) -> Tensor:
    """Return [N] int64: the turn, from 1, in which the policy wrote each token; 0 for tokens that it did not write.

    `mask_N` has flat responses, which begin at `offsets` ([B + 1]), and is nonzero where the policy wrote the token.
    """
    mask_N = mask_N.bool()
    begins_N = mask_N.clone()
    begins_N[1:] &= ~mask_N[:-1]
    first_E = offsets[:-1][offsets.diff() > 0]
    begins_N[first_E] = mask_N[first_E]
    counted = torch.cat([begins_N.new_zeros(1, dtype=torch.int64), begins_N.cumsum(0)])
    return (counted[1:] - counted[offsets[:-1]].repeat_interleave(offsets.diff())) * mask_N


@dataclass(frozen=True)
class MismatchByTurn(StatisticSet):
    """The metrics `mismatch/turn_<k>/...`, mergeable; empty if no response has a second turn."""

    @classmethod
    @torch.no_grad()
    def of_batch(cls, batch: FlatBatch, whole: MismatchStatistics, lengths: Tensor | None = None) -> Self:
        """Measure a batch, or a part of one, of the trainer's and the rollout's log-probs.

        `whole` are the statistics of the batch, which are those of turn 1 if there is no other turn. `lengths` [B] are
        the tokens of each response, with tool output, if responses are padded. The values of padding and tool output
        have no effect.
        """
        turns_N = turns_of(batch.mask, batch.offsets)
        written, most = turns_N.count_nonzero().double().cpu(), int(turns_N.max()) if len(turns_N) else 0
        tokens = torch.tensor(float(len(turns_N))) if lengths is None else lengths.sum().double().cpu()
        found: dict[str, Statistic] = {
            TURNS_MAX: Maximum(torch.tensor(float(most))),
            TOOL_FRACTION: Mean(tokens - written, tokens),
        }
        for turn in range(1, min(most, FURTHEST_TURN) + 1):
            if most > 1:
                of_turn_N = turns_N == turn if turn < FURTHEST_TURN else turns_N >= turn
                whole = MismatchStatistics.of_batch(batch._replace(mask=of_turn_N))
            found |= {of_turn(turn, name): statistic for name, statistic in whole.totals(BY_VERSION).items()}
        return cls.on_cpu(found)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        found = super().metrics()
        return found if found.get(TURNS_MAX, 0) > 1 else {}
