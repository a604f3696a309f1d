"""Splits the log-ratio of a clipped loss, and finds tokens that the clip cuts only because of the gap.

With a shadow, a forward of the trainer's present weights in the rollout's precision:

    beta  = log π(yₜ) - log shadow(yₜ)     same weights, two precisions
    alpha = log shadow(yₜ) - log μ(yₜ)     same precision, the policy's real change

so alpha + beta = log π - log μ, the log-ratio of a loss in bypass mode. A token is clipped when the loss takes its
clipped branch and its gradient is exactly zero (`losses.settings.ClipRange` decides where). It is phantom-clipped when
it is clipped with beta, and would not be clipped without. Sources: docs/metrics.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from verl_precision.base.mergeable import Mean, Share, Statistic, StatisticSet, merge_by_name, spread
from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.packing import Chunk, FlatBatch, flattened, packed_chunks
from verl_precision.mismatch.token_sums import CLASSES, ClassMean, class_totals, token_classes


@dataclass(frozen=True)
class PhantomStatistics(StatisticSet):
    """All `phantom/...` metrics, mergeable."""

    prefix: ClassVar[str] = "phantom/"

    @classmethod
    def measure(
        cls,
        trainer_log_probs: Tensor,
        shadow_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor | None,
        advantages: Tensor,
        clip: ClipRange | None = None,
        beta_in_ratio: bool = True,
        ended: Tensor | None = None,
    ) -> Self:
        """Measure a batch, or a part of one, given as `MismatchStatistics.measure` takes it.

        The log-probs of the shadow are those of the same weights in the rollout's precision. A token whose advantage
        has no sign (0, NaN) is never clipped. `clip` is the clip range of a loss that divides by the
        rollout's log-probs; None if the loss does not clip, or divides by other log-probs: then there are no metrics of
        clipping. `beta_in_ratio` tells whether the loss's ratio is π/μ, not shadow/μ (`ratio_source=shadow`).
        """
        log_probs = trainer_log_probs, shadow_log_probs, rollout_log_probs
        batch = flattened(*log_probs, mask=response_mask, advantages=advantages, ended=ended)
        return cls.of_batch(batch, clip, beta_in_ratio)

    @classmethod
    @torch.no_grad()
    def of_batch(cls, batch: FlatBatch, clip: ClipRange | None, beta_in_ratio: bool = True) -> Self:
        """Return the statistics of a batch of the trainer's, the shadow's and the rollout's log-probs."""
        statistics: list[dict[str, Statistic]] = []
        begin = 0
        for chunk in packed_chunks(batch):
            statistics.append(chunk.counts)
            counted_R = chunk.whole_R
            if batch.ended_B is not None:
                counted_R = counted_R & batch.ended_B[begin : begin + len(counted_R)].to(counted_R.device)
            begin += len(counted_R)
            if len(chunk):
                statistics.append(_token_statistics(chunk))
                if clip is not None:
                    statistics.append(_clip_statistics(chunk, clip, beta_in_ratio, counted_R))
        return cls.on_cpu(merge_by_name(statistics))


def _token_statistics(chunk: Chunk) -> dict[str, Statistic]:
    """Return metric -> statistic of alpha and beta in one chunk; a new metric is a new entry."""
    trainer_N, shadow_N, mu_N = chunk.log_probs
    alpha_N, beta_N = shadow_N - mu_N, trainer_N - shadow_N
    alpha = alpha_N.sum()
    tokens_C, beta_C, beta_abs_C = class_totals(token_classes(mu_N, chunk.advantages_N), beta_N)
    n = alpha_N.new_full((), len(chunk))
    return {
        "alpha_mean": Mean(alpha, n),
        "alpha_abs_mean": Mean(alpha_N.abs().sum(), n),
        **spread("alpha", alpha, n, alpha_N.dot(alpha_N), alpha_N.aminmax()),
        "beta_mean": ClassMean(beta_C, tokens_C, by=("sign",)),
        "beta_abs_mean": ClassMean(beta_abs_C, tokens_C, by=("bin",)),
        **spread("beta", beta_C, n, beta_N.dot(beta_N), beta_N.aminmax()),
    }


def _clip_statistics(chunk: Chunk, clip: ClipRange, beta_in_ratio: bool, counted_R: Tensor) -> dict[str, Statistic]:
    """Return metrics of clipped tokens, with and without beta; `counted_R`: the responses whose last token counts."""
    trainer_N, shadow_N, mu_N = chunk.log_probs
    advantages_N = chunk.advantages_N

    def ratio(log_ratio_N: Tensor) -> Tensor:
        if not clip.sequence:
            return log_ratio_N
        sums_R = torch.segment_reduce(log_ratio_N, "sum", lengths=chunk.lengths_R)
        # The loss leaves out a response with an unusable token: its ratio of 1 is never clipped.
        means_R = torch.where(chunk.whole_R, sums_R / chunk.lengths_R.clamp(min=1), 0)
        return means_R.repeat_interleave(chunk.lengths_R)

    log_ratios = ratio(trainer_N - mu_N), ratio(shadow_N - mu_N)
    with_beta_N, without_N = (clip.has_no_gradient(each_N, advantages_N) for each_N in log_ratios)
    n, bounds = trainer_N.new_full((), len(chunk)), tuple(clip)
    final_E = chunk.last_R[counted_R]
    useful_E = final_E[advantages_N[final_E] > 0]
    silenced = (with_beta_N if beta_in_ratio else without_N)[useful_E].sum()
    final = {"final_token_clip_fraction": Share(silenced, n.new_full((), len(useful_E)), bounds)}
    if not beta_in_ratio:
        return {
            "clipped_fraction": Share(without_N.sum(), n, bounds),
            "avoided_fraction": Share((with_beta_N & ~without_N).sum(), n, bounds),
            **final,
        }
    phantom_N, beta_N = with_beta_N & ~without_N, ratio(trainer_N - shadow_N)
    classes_N = token_classes(mu_N, advantages_N)
    tokens_C, phantom_C = (torch.bincount(classes_N, w, minlength=CLASSES).double() for w in (None, phantom_N.double()))
    return {
        "beta_beyond_clip_fraction": Share(((beta_N > clip.high) | (beta_N < clip.low)).sum(), n, bounds),
        "phantom_clipped_fraction": ClassMean(phantom_C, tokens_C, by=("sign", "bin")),
        "clipped_fraction": Share(with_beta_N.sum(), n, bounds),
        "missed_fraction": Share((without_N & ~with_beta_N).sum(), n, bounds),
        **final,
    }
