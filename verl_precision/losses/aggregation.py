"""From one objective per token to one loss per mini-batch, independent of the split of the mini-batch.

A mini-batch reaches a loss in pieces: micro-batches one after the other, data-parallel ranks side by side. Gradients of
micro-batches are added, gradients of ranks are averaged. A loss is invariant to the split if and only if every piece is
divided by constants of the WHOLE mini-batch and multiplied by the number of ranks. `Aggregation` holds these constants.

Shapes: B responses, T response tokens (padded).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_precision.base.errors import ConfigurationError, filled
from verl_precision.losses.settings import NORM_MODE, WORDS, require_normalizer

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM_MODE)
_require_constant = replace(require_normalizer, words=WORDS["constant"])


@dataclass(frozen=True)
class Aggregation:
    """How token values become a loss. The names of the modes are verl's `loss_agg_mode`.

    With s_b the sum over the tokens of response b, n_b their number, N responses and n tokens in the global mini-batch:

        seq-mean-token-sum-norm   (1/N) Σ_b s_b / C_norm      Dr.GRPO, https://arxiv.org/abs/2503.20783
        seq-mean-token-sum        (1/N) Σ_b s_b
        seq-mean-token-mean       (1/N) Σ_b s_b / n_b         GRPO, GSPO
        token-mean                (1/n) Σ_b s_b               DAPO
        token-sum                 Σ_b s_b

    N counts responses, not rows with tokens: a rejected or empty response has no gradient and stays in the denominator.
    None of the modes depends on the micro-batch split, the padding width, the order of rows or the number of ranks.

    Attributes:
        mode: One of `MODES`.
        normalizer: C_norm, one constant for the whole run (the maximum response length), for the `norm` mode alone.
            In a config: `actor.loss_scale_factor`.
        num_responses: N. None: the given rows are the mini-batch (one rank, one micro-batch).
        num_tokens: n. None: as above.
        dp_size: Number of data-parallel ranks whose gradients will be averaged.

    Raises:
        ConfigurationError: If a value is out of bounds, or a global count is missing with more than one rank.
    """

    mode: str = NORM_MODE
    normalizer: float | None = None
    num_responses: int | None = None
    num_tokens: int | None = None
    dp_size: int = 1

    def __post_init__(self) -> None:
        """Check the bounds; errors as in `Raises` above."""
        if self.mode not in MODES:
            remedy = f"Pass {NORM_MODE!r} for Dr.GRPO."
            raise ConfigurationError(setting="mode", value=self.mode, allowed=", ".join(MODES), remedy=remedy)
        if self.mode == NORM_MODE:
            _require_constant(self.normalizer)
        for setting, value in (("dp_size", self.dp_size), ("num_responses", self.num_responses)):
            if value is not None and value < 1:
                remedy = "Pass the counts of the mini-batch."
                raise ConfigurationError(setting=setting, value=value, allowed="1 or more", remedy=remedy)
        needed = "num_tokens" if self.mode == "token-mean" else "num_responses"
        if self.dp_size > 1 and self.mode != "token-sum" and getattr(self, needed) is None:
            raise ConfigurationError(**filled(WORDS["ranks"], dp_size=self.dp_size, needed=needed))


def row_scale(lengths_B: Tensor, aggregation: Aggregation, dtype: torch.dtype) -> Tensor:
    """Return k_b of loss = Σ_b k_b s_b from n_b, the valid tokens of each response: [B], or [] for all rows; finite."""
    ranks = float(aggregation.dp_size)
    if aggregation.mode == "token-sum":
        return lengths_B.new_tensor(ranks, dtype=dtype)
    if aggregation.mode == "token-mean":
        num_tokens = lengths_B.sum() if aggregation.num_tokens is None else torch.tensor(aggregation.num_tokens)
        return ranks / num_tokens.to(lengths_B.device, dtype).clamp(min=1)
    per_response = ranks / (aggregation.num_responses or max(lengths_B.shape[0], 1))
    if aggregation.mode == "seq-mean-token-mean":
        return per_response / lengths_B.to(dtype).clamp(min=1)
    divisor = aggregation.normalizer if aggregation.mode == NORM_MODE else 1
    assert divisor is not None  # checked when the Aggregation was made
    return lengths_B.new_tensor(per_response / divisor, dtype=dtype)


def aggregate(values_BT: Tensor, response_mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Aggregate token values to a scalar; see `Aggregation` for the formulas.

    Args:
        values_BT: [B, T] floating, one value per token.
        response_mask: [B, T], nonzero where a token counts.
        aggregation: Mode and constants.

    Returns:
        Scalar in the dtype of `values_BT`. Summed over micro-batches and averaged over ranks, it is the value of the
        whole mini-batch, and so is its gradient. The values of masked tokens have no effect.

    Raises:
        ConfigurationError: If the shapes differ.

    Example:
        >>> import torch
        >>> values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> aggregate(values, mask, Aggregation(normalizer=3)).item()  # (1/2) * (3/3 + 12/3)
        2.5
    """
    if values_BT.shape != response_mask.shape or values_BT.dim() != 2:
        shapes = {"values": tuple(values_BT.shape), "mask": tuple(response_mask.shape)}
        raise ConfigurationError(**filled(WORDS["mask's shape"], **shapes))
    valid = response_mask.bool()
    row_sums_B = torch.where(valid, values_BT, 0).sum(dim=-1)
    return (row_sums_B * row_scale(valid.sum(dim=-1), aggregation, values_BT.dtype)).sum()
