"""The square of the log-ratio as a further term of any loss: it pulls π back to the policy that drew the response."""

import torch
from torch import Tensor

from verl_precision.losses import metrics as reported
from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.metrics import LossOutput
from verl_precision.losses.ratios import bounded_, checked_batch, loss_with_slope
from verl_precision.losses.settings import require_gap_penalty


def gap_penalty(
    trainer_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, aggregation: Aggregation, beta: float
) -> LossOutput:
    """Return the loss of the objective -β/2 Σₜ (log rₜ)².

        ∇J = -β Σₜ log rₜ ∇log π(yₜ; θ),   rₜ = π(yₜ; θ) / μ(yₜ; θ')

    π trainer's policy, μ rollout's policy (in bypass mode; else π(θ')). With β = 2τ this is τ (log π/μ)² of
    https://arxiv.org/abs/2602.02276, and the penalty of verl's loss `dro`, whose setting `dro_beta` is β.

    Arguments, result, errors, masked tokens, empty and non-finite rows as in `grpo`, with `old_log_probs`, [B, T]
    floating, log μ(yₜ; θ') in nats, and `beta`, β > 0. β log rₜ is held at ±2e11 in float32. `actor/gap_penalty` is
    the mean of β/2 (log rₜ)² over the tokens.
    """
    weight = require_gap_penalty(beta)
    nothing_B = torch.zeros(len(response_mask), device=trainer_log_probs.device)
    batch = checked_batch(trainer_log_probs, old_log_probs, nothing_B, response_mask, other="old_log_probs")
    slope_BT = bounded_(-weight * batch.log_ratio_BT)
    penalty_BT = bounded_(weight / 2 * batch.log_ratio_BT.square())
    objective_B = -torch.where(batch.valid_BT, penalty_BT, 0).sum(dim=-1)
    loss = loss_with_slope(batch, objective_B, slope_BT, aggregation)
    return LossOutput(loss, {"actor/gap_penalty": reported.mean(penalty_BT, batch.valid_BT)})
