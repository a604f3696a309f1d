"""The paper's estimators as functions of tensors; importing this needs torch and nothing of verl.

    policy_gradient   pg_seq_is (5), pg_seq_tis (6), pg_seq_mis (7): importance-weighted policy gradient
    grpo              grpo (8), gspo; off_policy_sequence_mask (DeepSeek-V3.2), also decoupled as TRL and slime wire it;
                      interventions grpo_unclipped, ratio_one
    rollout_weights   token_tis_weights (9), seq_mis_weights (10), geo_mask, icepop, kpop: weights that `grpo` takes
    cispo             cispo
    dppo              dppo_tv, dppo_kl: a trust region of probabilities
    gap_penalty       the square of the log-ratio, added to any loss
    aggregation       from one value per token to the loss of a mini-batch
    ratios            checks of inputs; ratios and their bounds
    metrics           metrics that merge over micro-batches and ranks
    settings          bounds of C, of the clip range and of the constant, and where each loss clips
    invariance        try_loss, assert_conforms: whether a loss, also your own, depends on the split of a batch
    registry          POLICY_LOSSES: name -> entry; `policy_loss` adds one; the loss of a config

A new loss is a new module here, with `@policy_loss` on its function: every module of this folder is imported below.
Give it a preset of its name in presets/estimator/, and its equation in tests/losses/plain_equations.py.

Numbers are equations of https://arxiv.org/abs/2510.26788; docs/math.md explains when to use which loss.
"""

import importlib
import pkgutil

from verl_precision.losses.aggregation import Aggregation as Aggregation
from verl_precision.losses.cispo import cispo as cispo
from verl_precision.losses.dppo import dppo_kl as dppo_kl
from verl_precision.losses.dppo import dppo_tv as dppo_tv
from verl_precision.losses.gap_penalty import gap_penalty as gap_penalty
from verl_precision.losses.grpo import grpo as grpo
from verl_precision.losses.grpo import grpo_unclipped as grpo_unclipped
from verl_precision.losses.grpo import gspo as gspo
from verl_precision.losses.grpo import off_policy_sequence_mask as off_policy_sequence_mask
from verl_precision.losses.grpo import off_policy_sequence_mask_decoupled as off_policy_sequence_mask_decoupled
from verl_precision.losses.grpo import ratio_one as ratio_one
from verl_precision.losses.invariance import assert_conforms as assert_conforms
from verl_precision.losses.metrics import LossOutput as LossOutput
from verl_precision.losses.metrics import Statistic as Statistic
from verl_precision.losses.policy_gradient import pg_seq_is as pg_seq_is
from verl_precision.losses.policy_gradient import pg_seq_mis as pg_seq_mis
from verl_precision.losses.policy_gradient import pg_seq_tis as pg_seq_tis
from verl_precision.losses.registry import POLICY_LOSSES as POLICY_LOSSES
from verl_precision.losses.registry import PolicyLoss as PolicyLoss
from verl_precision.losses.registry import policy_loss as policy_loss
from verl_precision.losses.rollout_weights import geo_mask_weights as geo_mask_weights
from verl_precision.losses.rollout_weights import icepop_weights as icepop_weights
from verl_precision.losses.rollout_weights import kpop_weights as kpop_weights
from verl_precision.losses.rollout_weights import seq_mis_weights as seq_mis_weights
from verl_precision.losses.rollout_weights import token_tis_weights as token_tis_weights

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
