"""Metrics that a loss reports, as statistics that merge over micro-batches and ranks (`verl_precision.base.mergeable`).

`integration/trainer/merged_metrics.py` carries them through verl.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl_precision.base.mergeable import Count, Maximum, Mean, Minimum, Statistic, added, joined, same, smallest
from verl_precision.losses.ratios import Batch, largest_ratio

ESS = "actor/is_weight_ess_fraction"
QUANTILES = (0.05, 0.5, 0.95)
# Larger weights count as this in mean and effective sample size, because their squares, in float64, end at 1e308.
LARGEST_SQUARED = 1e150


class LossOutput(NamedTuple):
    """The result of a loss; masks are [B, T] bool, None if the loss does not report one."""

    loss: Tensor  # scalar; call `loss.backward()`
    metrics: Mapping[str, Statistic]  # by name; see docs/math.md for each
    kept: Tensor | None = None  # tokens with a gradient
    clipped: Tensor | None = None  # tokens without a gradient only because of the clip range
    truncated: Tensor | None = None  # tokens whose ratio or weight is held at a bound of the loss

    def adding(self, metrics: Mapping[str, Statistic]) -> "LossOutput":
        """Return the same output with more metrics."""
        return self._replace(metrics={**self.metrics, **metrics})

    def values(self) -> dict[str, float]:
        """Return the metrics as numbers, without metrics that are undefined on this batch."""
        numbers = {name: statistic.value() for name, statistic in self.metrics.items()}
        return {name: number for name, number in numbers.items() if not math.isnan(number)}


def effective_share(total: Tensor, squares: Tensor, number: Tensor) -> float:
    """Return (Σw)² / (n Σw²): 1 if all weights are equal, 1/n if all but one are 0, 0 if all are 0."""
    return 0.0 if squares == 0 and number > 0 else (total**2 / (squares * number)).item()


@dataclass(frozen=True)
class WeightStatistic(Statistic):
    """A statistic of weights: over responses if each has one weight, otherwise over tokens, decided after the merge."""

    responses: Tensor = added()  # Σw, Σw² and n over the responses, w a response's mean over its tokens
    tokens: Tensor = added()  # the same over the tokens
    one_each: Tensor = smallest()  # 1 if each response has one weight, 0 if weights differ within a response
    number: str = same()  # "mean", or the effective sample size of "responses" or "tokens"

    def value(self) -> float:
        """Return the number; NaN for the effective sample size over the other unit."""
        unit, sums = ("responses", self.responses) if self.one_each else ("tokens", self.tokens)
        if self.number == "mean":
            return (sums[0] / sums[2]).item()
        return effective_share(*sums) if self.number == unit else math.nan


@dataclass(frozen=True)
class Quantile(Statistic):
    """The quantile `q` of all values, linearly interpolated."""

    sample: Tensor = joined()
    q: float = same()

    def value(self) -> float:
        """Return the quantile."""
        return torch.quantile(self.sample.double(), self.q).item() if self.sample.numel() else math.nan


def fraction(hits: Tensor, among: Tensor) -> Statistic:
    """Return the share of `hits` (bool) in `among` (bool of the same shape, or counts)."""
    return Mean(hits.count_nonzero().double(), among.sum().double())  # `sum` would convert each to int64 first


def extremes(values: Tensor, valid: Tensor, name: str) -> dict[str, Statistic]:
    """Return minimum and maximum over the valid values, `<name>_min` and `<name>_max`."""
    nothing = values.new_tensor(math.inf)  # the value of a piece without values
    lowest = torch.where(valid, values, math.inf).amin() if values.numel() else nothing
    highest = torch.where(valid, values, -math.inf).amax() if values.numel() else -nothing
    return {f"{name}_min": Minimum(lowest), f"{name}_max": Maximum(highest)}


def mean(values: Tensor, valid: Tensor) -> Statistic:
    """Return the mean over the valid values."""
    return Mean(torch.where(valid, values, 0).sum(dtype=torch.float64), valid.sum().double())


def weight_statistics(weights: Tensor, valid: Tensor) -> dict[str, Statistic]:
    """Return statistics of the importance weights where `valid`: [B, T] of tokens, or [B] of responses.

    `actor/is_weight_mean` (1 is healthy), `actor/is_weight_max`, and the effective sample size as a fraction:
    `actor/is_weight_ess_fraction` of the responses if each response has one weight, otherwise
    `actor/is_weight_token_ess_fraction` of the tokens. The other fraction is NaN; [B] gives no fraction of tokens.
    """
    largest_weight, of_tokens = extremes(weights, valid, "")["_max"], weights.dim() == 2
    if not of_tokens:
        weights, valid = weights.unsqueeze(-1), valid.unsqueeze(-1)
    kept_BT, lengths_B = torch.where(valid, weights, 0).double().clamp(max=LARGEST_SQUARED), valid.sum(dim=-1)
    of_responses = kept_BT.sum(dim=-1) / lengths_B.clamp(min=1)
    responses, tokens = (
        torch.stack([values.sum(), values.square().sum(), counted.sum().double()])
        for values, counted in ((of_responses, lengths_B > 0), (kept_BT, valid))
    )
    apart_BT = valid & (kept_BT != kept_BT.amax(dim=-1, keepdim=True)) if kept_BT.numel() else valid
    one_each = (~apart_BT.any()).double()
    found: dict[str, Statistic] = {
        "actor/is_weight_mean": WeightStatistic(responses, tokens, one_each, "mean"),
        "actor/is_weight_max": largest_weight,
        ESS: WeightStatistic(responses, tokens, one_each, "responses"),
    }
    if of_tokens:
        found["actor/is_weight_token_ess_fraction"] = WeightStatistic(responses, tokens, one_each, "tokens")
    return found


def shared_metrics(batch: Batch, has_loss_B: Tensor, slope_BT: Tensor, kept_BT: Tensor) -> dict[str, Statistic]:
    """Return the metrics of every loss (docs/math.md); the slope, the factor of ∇log π(yₜ), is [B, T], or [B, 1].

    A response whose advantage or weight is 0 has neither loss nor gradient; a response that is clipped as a whole has a
    loss. A token is held if its ratio, or a product with the ratio, was bounded, so that its gradient is too small.
    """
    sample = batch.sequence_log_ratio_B[batch.rows_B]
    least = batch.advantages_BT.abs().clamp_(max=1).mul_(largest_ratio(slope_BT.dtype))
    if batch.weights_BT is not None:
        least = least * torch.where(batch.valid_BT, batch.weights_BT, 0).clamp_(max=1)
    held_BT = (slope_BT >= least) | (slope_BT <= least.neg_())
    silent = (batch.rows_B & ~kept_BT.any(dim=-1)).sum().double()
    return {
        "actor/zero_loss_responses": Count((batch.rows_B & ~has_loss_B).sum().double()),
        "actor/zero_gradient_responses": Count(silent),
        "actor/zero_gradient_fraction": Mean(silent, batch.rows_B.sum().double()),
        "actor/held_tokens": Count((kept_BT & held_BT).count_nonzero().double()),
        **{f"actor/seq_log_ratio_q{round(100 * q):02d}": Quantile(sample, q) for q in QUANTILES},
        "actor/nonfinite_responses": Count(batch.nonfinite.double()),
    }
