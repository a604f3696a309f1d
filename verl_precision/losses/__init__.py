"""The paper's estimators as functions of tensors; importing this needs torch and nothing of verl.

    policy_gradient   pg_seq_is (5), pg_seq_tis (6), pg_seq_mis (7): importance-weighted policy gradient
    grpo              grpo (8); interventions grpo_unclipped, ratio_one
    rollout_weights   token_tis_weights (9), seq_mis_weights (10): with them, `grpo` is those equations
    gspo              gspo
    ratios            shared: checked inputs, ratios and their guards
    surrogate         shared: the clipped objective
    metrics           shared: metrics that survive micro-batches and ranks
    registry          POLICY_LOSSES: name -> entry; `policy_loss` adds your own
    settings          bounds of C and of the clip range; the rules of a config ask here (rules/loss_rules.py)
    verl_adapter, verl_metrics, verl_weights   the only modules that know verl

Numbers are equations of https://arxiv.org/abs/2510.26788; docs/math.md says when to use which.
"""

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.grpo import grpo, grpo_unclipped, ratio_one
from verl_precision.losses.gspo import gspo
from verl_precision.losses.metrics import LossOutput, Statistic
from verl_precision.losses.policy_gradient import pg_seq_is, pg_seq_mis, pg_seq_tis
from verl_precision.losses.registry import POLICY_LOSSES, PolicyLoss, policy_loss
from verl_precision.losses.rollout_weights import seq_mis_weights, token_tis_weights

__all__ = [
    "POLICY_LOSSES",
    "Aggregation",
    "LossOutput",
    "PolicyLoss",
    "Statistic",
    "grpo",
    "grpo_unclipped",
    "gspo",
    "pg_seq_is",
    "pg_seq_mis",
    "pg_seq_tis",
    "policy_loss",
    "ratio_one",
    "seq_mis_weights",
    "token_tis_weights",
]

_PAPER = "arXiv 2510.26788"
policy_loss("pg_seq_is", "policy gradient, importance weight of the whole response", f"{_PAPER} eq. (5)")(pg_seq_is)
policy_loss("pg_seq_tis", "pg_seq_is with the weight truncated at C", f"{_PAPER} eq. (6)")(pg_seq_tis)
policy_loss("pg_seq_mis", "pg_seq_is with responses rejected beyond C", f"{_PAPER} eq. (7)")(pg_seq_mis)
policy_loss("grpo", "clipped surrogate, no dual clip; weighted: eq. (9), (10)", f"{_PAPER} eq. (8)")(grpo)
policy_loss("vp_gspo", "clipped surrogate on the length-normalised sequence ratio", "arXiv 2507.18071 eq. (5)-(7)")(
    gspo
)
policy_loss("grpo_unclipped", "intervention: grpo with clipping off", f"{_PAPER} eq. (8), infinite clip range")(
    grpo_unclipped
)
policy_loss("ratio_one", "intervention: grpo with the ratio set to 1", f"{_PAPER} eq. (8) at r = 1")(ratio_one)
