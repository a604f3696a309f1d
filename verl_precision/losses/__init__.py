"""The paper's estimators as functions of tensors; importing this needs torch and nothing of verl.

    policy_gradient   pg_seq_is (5), pg_seq_tis (6), pg_seq_mis (7): importance-weighted policy gradient
    grpo              grpo (8); interventions grpo_unclipped, ratio_one; the clipped objective
    rollout_weights   token_tis_weights (9), seq_mis_weights (10), geo_mask, icepop, kpop: with them `grpo` is those
    gspo              gspo
    cispo             cispo
    dppo              dppo_tv, dppo_kl: a trust region of probabilities
    off_policy_sequence_mask   the mask of DeepSeek-V3.2
    clipping          what a loss divides by and where it clips, stated for each loss, verl's too
    aggregation       from one value per token to the loss of a mini-batch
    ratios            checked inputs, ratios and their guards
    metrics           metrics that survive micro-batches and ranks
    settings          bounds of C, the clip range and the constant; the rules of a config ask here (check/rules/loss.py)
    registry          POLICY_LOSSES: name -> entry; `policy_loss` adds one

A new loss is a new module here, with `@policy_loss` on its function: every module of this folder is imported below.
Give it a preset of its name in presets/estimator/, and its equation in tests/losses/plain_equations.py.

Numbers are equations of https://arxiv.org/abs/2510.26788; docs/math.md says when to use which.
"""

import importlib
import pkgutil

from verl_precision.losses.aggregation import Aggregation
from verl_precision.losses.cispo import cispo
from verl_precision.losses.dppo import dppo_kl, dppo_tv
from verl_precision.losses.grpo import grpo, grpo_unclipped, ratio_one
from verl_precision.losses.gspo import gspo
from verl_precision.losses.metrics import LossOutput, Statistic
from verl_precision.losses.off_policy_sequence_mask import off_policy_sequence_mask
from verl_precision.losses.policy_gradient import pg_seq_is, pg_seq_mis, pg_seq_tis
from verl_precision.losses.registry import POLICY_LOSSES, PolicyLoss, policy_loss
from verl_precision.losses.rollout_weights import (
    geo_mask_weights,
    icepop_weights,
    kpop_weights,
    seq_mis_weights,
    token_tis_weights,
)

__all__ = [
    "POLICY_LOSSES",
    "Aggregation",
    "LossOutput",
    "PolicyLoss",
    "Statistic",
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "geo_mask_weights",
    "grpo",
    "grpo_unclipped",
    "gspo",
    "icepop_weights",
    "kpop_weights",
    "off_policy_sequence_mask",
    "pg_seq_is",
    "pg_seq_mis",
    "pg_seq_tis",
    "policy_loss",
    "ratio_one",
    "seq_mis_weights",
    "token_tis_weights",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
