"""Shared by all losses: checked inputs, probability ratios, and a loss with a given gradient.

Shapes: B responses, T response tokens (padded). Weights, ratios and clipping decisions need no automatic
differentiation: the gradient of every estimator of this package is Σ_t slope_t ∇log π(y_t) with slopes that are plain
numbers. So they are computed without a graph, and `loss_with_slope` passes them to autograd unchanged. The result is
exact, and no overflow or NaN of an intermediate result can reach a gradient through 0 x inf.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.losses.aggregation import Aggregation, row_scale
from verl_precision.losses.settings import WORDS

# Guard 1. A ratio is at most the root of its dtype's largest number, divided by HEADROOM: e^25.9 in float32, e^336.5 in
# float64. The root, because the gradient's norm sums squares. HEADROOM leaves room for the factors of the ratio: the
# norm of ∇log π(yₜ) and the sum over tokens. A small ratio needs no guard: exp underflows to 0, the nearest number.
HEADROOM = 1e8


def largest_ratio(dtype: torch.dtype) -> float:
    """Return the largest value of a ratio, and of a ratio times advantage; larger values are replaced by it."""
    return float(torch.finfo(dtype).max ** 0.5 / HEADROOM)


def bounded_exp(log_ratio: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(log_ratio) as `dtype`, never inf: larger values become `largest_ratio(dtype)`."""
    return log_ratio.exp().clamp_(max=largest_ratio(dtype)).to(dtype)


def bounded_(product: Tensor) -> Tensor:
    """Hold ratio x advantage within ±`largest_ratio`, in place: guard 2, for |A| > 1 at the largest ratio."""
    limit = largest_ratio(product.dtype)
    return product.clamp_(-limit, limit)


@dataclass(frozen=True)
class Batch:
    """The checked inputs of a loss; only `trainer_log_probs` has a graph."""

    trainer_log_probs: Tensor  # as given; for `loss_with_slope` alone
    log_ratio_BT: Tensor  # log of the probability ratio of each token, 0 where masked
    advantages_BT: Tensor  # [B, T], or [B, 1] with one advantage per response
    weights_BT: Tensor | None  # constant weights of the tokens
    valid_BT: Tensor  # bool; tokens that count. Rows with a non-finite number count none.
    lengths_B: Tensor  # number of tokens that count
    nonfinite: Tensor  # [] number of responses left out because a number of a valid token is NaN or infinite

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all results: float32, or float64 if the log-probs are float64."""
        return self.log_ratio_BT.dtype

    @property
    def ratio_BT(self) -> Tensor:
        """The ratio of each token, held at `largest_ratio`."""
        return bounded_exp(self.log_ratio_BT, self.dtype)

    @property
    def rows_B(self) -> Tensor:
        """Responses with at least one token that counts."""
        return self.lengths_B > 0

    @cached_property
    def sequence_log_ratio_B(self) -> Tensor:
        """[B] float64, log of the ratio of whole responses: Σ_t log_ratio_t, summed in float64."""
        return torch.where(self.rows_B, self.log_ratio_BT.sum(dim=-1, dtype=torch.float64), 0)

    @property
    def mean_log_ratio_B(self) -> Tensor:
        """[B] float64, the mean of log_ratio_t over a response's tokens."""
        return self.sequence_log_ratio_B / self.lengths_B.clamp(min=1)


def checked_batch(
    trainer_log_probs: Tensor, other_log_probs: Tensor, advantages: Tensor, response_mask: Tensor,
    rollout_is_weights: Tensor | None = None, other: str = "proximal_log_probs",
) -> Batch:  # fmt: skip
    """Return the checked batch without non-finite responses; errors call `other_log_probs` by the name `other`."""
    named = {"trainer_log_probs": trainer_log_probs, other: other_log_probs, "advantages": advantages}
    named |= {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
    shape = getattr(trainer_log_probs, "shape", ())
    for name, tensor in {**named, "response_mask": response_mask}.items():
        if not isinstance(tensor, Tensor) or (name in named and not tensor.is_floating_point()):
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            allowed = "a floating-point tensor" if name in named else "a tensor, nonzero where a token counts"
            remedy = f"Pass torch.as_tensor({name}).float(); log-probs, not tokens."
            raise ConfigurationError(f"{name} is {got}", allowed=allowed, remedy=remedy)
        per_response = name == "advantages" and tensor.shape in (shape[:1], (*shape[:1], 1))
        if len(shape) != 2 or not (tensor.shape == shape or per_response):
            words = filled(WORDS["shapes"], name=name, shape=tuple(tensor.shape), first=tuple(shape))
            raise ConfigurationError(**words)
    with torch.no_grad():
        dtype = torch.promote_types(trainer_log_probs.dtype, torch.float32)
        mask_BT = response_mask.bool()
        log_ratio_BT = (trainer_log_probs.to(dtype) - other_log_probs).masked_fill_(~mask_BT, 0).to(dtype)
        advantages_BT = (advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)).to(dtype)
        finite_B = _finite_rows(log_ratio_BT) & _finite_rows(torch.where(mask_BT, advantages_BT, 0))
        if rollout_is_weights is not None:
            finite_B &= _finite_rows(torch.where(mask_BT, rollout_is_weights, 0))
        valid_BT = mask_BT & finite_B.unsqueeze(-1)
        counted = valid_BT, valid_BT.sum(dim=-1), (~finite_B).sum()
        return Batch(trainer_log_probs, log_ratio_BT, advantages_BT, rollout_is_weights, *counted)


def _finite_rows(values_BT: Tensor) -> Tensor:
    """Return [B] bool; a minimum or maximum of values with NaN is NaN, so one pass over the values is enough."""
    if values_BT.shape[-1] == 0:
        return torch.ones_like(values_BT[:, :0].sum(dim=-1), dtype=torch.bool)
    low_B, high_B = values_BT.aminmax(dim=-1)
    return low_B.isfinite() & high_B.isfinite()


def loss_with_slope(batch: Batch, objective_B: Tensor, slope_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """Return the loss: minus the aggregated objective of the responses, with the gradient of -Σ slope log π.

    Only the trainer's log-probs receive a gradient. The slope, factor of ∇log π(yₜ), counts where `batch.valid_BT`.
    """
    with torch.no_grad():
        scale = row_scale(batch.lengths_B, aggregation, slope_BT.dtype)
        value = -(torch.where(batch.rows_B, objective_B, 0) * scale).sum()
        per_token = -scale if scale.dim() == 0 else -scale.unsqueeze(-1)
        gradient_BT = torch.where(batch.valid_BT, slope_BT * per_token, 0)
    loss: Tensor = _GivenGradient.apply(batch.trainer_log_probs, value, gradient_BT)
    return loss


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return x̃ = `value` in the dtype of `gradient_of`, with ∂x̃/∂gradient_of = 1, also where x̃ is not finite."""
    return _GivenGradient.apply(gradient_of, value.detach().to(gradient_of.dtype), value.new_ones(()))


class _GivenGradient(torch.autograd.Function):
    """A value with a given first derivative; there is no second."""

    @staticmethod
    def forward(ctx, log_probs, value, gradient):
        ctx.save_for_backward(gradient)
        ctx.log_probs_dtype = log_probs.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, loss_gradient):
        (gradient,) = ctx.saved_tensors
        return (loss_gradient * gradient).to(ctx.log_probs_dtype), None, None
