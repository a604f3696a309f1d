"""The mismatch of responses by how many versions of the weights they are behind: staleness apart from precision.

A response of the current version was sampled with the weights that the trainer scores it with: its gap is precision
alone. In asynchronous training others are older, and their gap is also what the policy has learned since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import Self

from verl_precision.base.mergeable import Count, merge_by_name
from verl_precision.losses.clipping import ClipRange
from verl_precision.mismatch.metric_names import BY_VERSION, STALE_FRACTION, behind
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.statistics import MismatchStatistics

# Responses this many versions behind, or more, are measured together.
FURTHEST = 3


@dataclass(frozen=True)
class MismatchByVersion:
    """All `mismatch/...` metrics, mergeable."""

    # versions behind, 0 to `FURTHEST` -> the statistics of these responses
    groups: Mapping[int, MismatchStatistics] = field(default_factory=dict)

    @classmethod
    def measure(
        cls,
        trainer_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        advantages: Tensor,
        versions_behind: Sequence[int],
        ratio_threshold: float = 3.0,
        ended: Tensor | None = None,
    ) -> Self:
        """Measure a batch, or a part of one, given as `MismatchStatistics.measure` takes it.

        `versions_behind` is that of each response; 0: sampled with the weights of `trainer_log_probs`.
        """
        tensors = (trainer_log_probs, rollout_log_probs, response_mask, advantages)
        groups = [min(count, FURTHEST) for count in versions_behind]
        rows = {group: [row for row, other in enumerate(groups) if other == group] for group in set(groups)}
        return cls({group: _measure(*_of_rows(tensors, ended, kept), ratio_threshold) for group, kept in rows.items()})

    def merge(self, other: Self) -> Self:
        """Return the statistics of both pieces together; neither changes."""
        return type(self)(merge_by_name([self.groups, other.groups]))

    @property
    def whole(self) -> MismatchStatistics:
        """The statistics of all responses."""
        return MismatchStatistics(merge_by_name(group.statistics for group in self.groups.values()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all responses; if some are not current, also those of each version behind."""
        found = self.whole.metrics()
        groups = {group: statistics.metrics() for group, statistics in self.groups.items()}
        tokens = {group: metrics["mismatch/tokens"] for group, metrics in groups.items() if metrics["mismatch/tokens"]}
        if tokens:
            found[STALE_FRACTION] = 1 - tokens.get(0, 0.0) / sum(tokens.values())
        for group in tokens if set(tokens) != {0} else ():
            found |= {behind(group, name): groups[group][name] for name in BY_VERSION}
        return found

    def histograms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `MismatchStatistics.histograms` of all responses."""
        return self.whole.histograms()


def _of_rows(
    tensors: Sequence[Tensor], ended: Tensor | None, kept: list[int]
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return some rows of padded or nested tensors, and of `ended`; all of them: the tensors."""
    if len(kept) == len(tensors[0]):
        return tensors, ended
    of_kept = None if ended is None else ended[kept]
    if not tensors[0].is_nested:
        return [tensor[kept] for tensor in tensors], of_kept
    every = [tensor.unbind() for tensor in tensors]
    return [torch.nested.as_nested_tensor([rows[row] for row in kept], layout=torch.jagged) for rows in every], of_kept


def _measure(tensors: Sequence[Tensor], ended: Tensor | None, ratio_threshold: float) -> MismatchStatistics:
    """Measure, and say which engine made what is not finite; that takes a second look, where there is any."""
    trainer, rollout, mask, advantages = tensors
    found = MismatchStatistics.measure(trainer, rollout, mask, advantages, ratio_threshold, ended=ended)
    broken = found.statistics["nonfinite_tokens"]
    counts = {}
    for engine, log_probs in (("trainer", trainer), ("rollout", rollout)):
        counts[f"nonfinite_{engine}_tokens"] = _nonfinite(log_probs, mask) if broken.value() else broken
    return MismatchStatistics({**found.statistics, **counts})


def _nonfinite(log_probs: Tensor, mask: Tensor) -> Count:
    values, valid = (tensor.values() if tensor.is_nested else tensor for tensor in (log_probs, mask))
    return Count((~values.isfinite() & valid.bool()).sum()).on_cpu()


def beta_of_current_version(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    versions_behind: Sequence[int],
    clip: ClipRange | None,
    ended: Tensor | None = None,
) -> PhantomStatistics:
    """Measure the responses of the current version with the rollout in place of a shadow: alpha is 0, the gap is beta.

    `versions_behind` is as `MismatchByVersion.measure` takes it, all else as `PhantomStatistics.measure`.
    """
    kept = [row for row, count in enumerate(versions_behind) if not count]
    if not kept:
        return PhantomStatistics()
    tensors = (trainer_log_probs, rollout_log_probs, response_mask, advantages)
    (trainer, rollout, mask, signs), ended = _of_rows(tensors, ended, kept)
    return PhantomStatistics.measure(trainer, rollout, rollout, mask, signs, clip, ended=ended)
