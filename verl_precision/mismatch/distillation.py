"""How much of a teacher's signal is the noise of two engines, in on-policy distillation.

    signal = log π_T(yₜ) - log π(yₜ)     the teacher, scored by its engine; the student, by the trainer
    floor  = log μ(yₜ) - log π(yₜ)       the student twice: by the rollout and by the trainer

A teacher with the student's weights has a signal of the floor's size: E[floor²] ≈ 2·k3. docs/metrics.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from verl_precision.base.mergeable import Mean, StatisticSet, merge_by_name
from verl_precision.mismatch.packing import Chunk, FlatBatch, packed_chunks


@dataclass(frozen=True)
class DistillationStatistics(StatisticSet):
    """All `distillation/...` metrics of ours, mergeable."""

    prefix: ClassVar[str] = "distillation/"

    @classmethod
    @torch.no_grad()
    def of_batch(cls, batch: FlatBatch) -> Self:
        """Measure a batch of log-probs of the teacher, the trainer and the rollout, in nats.

        The values of masked tokens have no effect. Tokens with a log-prob that is not finite, or is above 0, are left
        out; without a token every metric is undefined.
        """
        return cls.on_cpu(merge_by_name(map(_of_chunk, packed_chunks(batch))))

    @classmethod
    @torch.no_grad()
    def of_truncated(cls, losses: Tensor, mask: Tensor) -> Self:
        """Measure the KL over the teacher's top k tokens, [B, T] in nats: verl's clamp at 0 ends a negative one."""
        losses_N = losses[mask.bool()]
        found = {"clamped_fraction": losses_N < 0, "loss_abs_mean": losses_N.abs()}
        return cls.on_cpu({name: Mean(values.sum(), mask.bool().sum()) for name, values in found.items()})


def _of_chunk(chunk: Chunk) -> dict[str, Mean]:
    teacher_N, trainer_N, rollout_N = chunk.log_probs
    signal_N, floor_N, n = teacher_N - trainer_N, rollout_N - trainer_N, torch.tensor(len(chunk))
    of_rollout_N = teacher_N - rollout_N
    squares, floor_squares = signal_N.dot(signal_N), floor_N.dot(floor_N)
    return {
        "teacher_gap_mean": Mean(signal_N.sum(), n),
        "teacher_gap_square_mean": Mean(squares, n),
        "floor_square_mean": Mean(floor_squares, n),
        "noise_share": Mean(floor_squares, squares),
        "sign_noise_fraction": Mean((signal_N.sign() != of_rollout_N.sign()).sum(), n),
        "teacher_rollout_square_mean": Mean(of_rollout_N.dot(of_rollout_N), n),
        "teacher_equal_fraction": Mean((signal_N == 0).sum(), n),
    }
