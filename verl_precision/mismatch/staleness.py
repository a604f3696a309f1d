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
from verl_precision.mismatch.packing import flattened
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
        log_probs = {"trainer_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
        batch, found = flattened(log_probs, response_mask, advantages), {}
        groups_B = torch.tensor(versions_behind, dtype=torch.int64).clamp(max=FURTHEST)
        for group in groups_B.unique().tolist():
            part = batch.only(groups_B == group)
            measured = MismatchStatistics.of_batch(part, ratio_threshold, ended=ended)
            broken = measured.statistics["nonfinite_tokens"]  # whose they are takes a second look, where there are any
            counts = {
                f"nonfinite_{engine}_tokens": _nonfinite(each, part.mask) if broken.value() else broken
                for engine, each in zip(("trainer", "rollout"), part.log_probs, strict=True)
            }
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
        """Return the metrics of all responses; if some are not current, also those of each version behind."""
        found = self.whole.metrics()
        groups = {group: statistics.metrics() for group, statistics in self.groups.items()}
        tokens = {group: metrics["mismatch/tokens"] for group, metrics in groups.items() if metrics["mismatch/tokens"]}
        if tokens:
            found[STALE_FRACTION] = 1 - tokens.get(0, 0.0) / sum(tokens.values())
        for group in tokens if set(tokens) != {0} else ():
            found |= {behind(group, name): groups[group][name] for name in BY_VERSION}
        return found


def _nonfinite(log_probs: Tensor, mask: Tensor) -> Count:
    return Count((~log_probs.isfinite() & mask).sum()).on_cpu()


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
    current_B = torch.tensor(versions_behind) == 0
    if not current_B.any():
        return PhantomStatistics()
    log_probs = {"trainer_log_probs": trainer_log_probs, "rollout_log_probs": rollout_log_probs}
    batch = flattened(log_probs, response_mask, advantages).only(current_B)
    trainer, rollout = batch.log_probs
    return PhantomStatistics.of_batch(batch._replace(log_probs=(trainer, rollout, rollout)), clip, ended=ended)
