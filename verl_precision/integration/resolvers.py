"""Resolvers of this package's configs.

`${verl_precision.tiny_model:<architecture>}`: the folder of a tiny model, built when first asked for.
`${verl_precision.fraction:<length>,<parts>}`: a length divided by a whole number, at least 1.
`${verl_precision.per_rank:<prompts>,<responses>,<ranks>}`: responses to that many prompts, divided by the ranks; a
micro-batch of that size takes a rank's whole share (verl wants the share to be a multiple of it).
`${verl_precision.sync_is_verified:}`: whether `VerifiedWeightSyncExtension` is at the other end of the weight stream:
in vLLM, fed by the trainer itself. Other rollouts and backends would take the manifest for a weight.
`${verl_precision.run_name:}`: precisions and estimator of a run, e.g. fp16_pg_seq_is or
bf16_train_fp16_rollout_grpo_vp_token_tis: runs that differ in them must not resume from each other's checkpoints.
(Hydra's own `hydra:runtime.choices` cannot be resolved in verl's Ray workers.)
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

TINY_MODEL = "verl_precision.tiny_model"
FRACTION = "verl_precision.fraction"
PER_RANK = "verl_precision.per_rank"
SYNC_IS_VERIFIED = "verl_precision.sync_is_verified"
RUN_NAME = "verl_precision.run_name"


def register_resolvers(omegaconf: ModuleType) -> None:
    """Register this package's resolvers with OmegaConf, once."""
    for name, function in (
        (TINY_MODEL, _tiny_model),
        (FRACTION, _fraction),
        (PER_RANK, _per_rank),
        (SYNC_IS_VERIFIED, _sync_is_verified),
        (RUN_NAME, _run_name),
    ):
        if not omegaconf.OmegaConf.has_resolver(name):
            omegaconf.OmegaConf.register_new_resolver(name, function)


def _tiny_model(architecture: str) -> str:
    from verl_precision.tiny_model import cached_tiny_model

    return str(cached_tiny_model(architecture))


def _fraction(length: int, parts: int) -> int:
    return max(length // parts, 1)


def _per_rank(prompts: int, responses: int, ranks: int) -> int:
    return max(prompts * responses // ranks, 1)


def _sync_is_verified(_root_: DictConfig) -> bool:
    from omegaconf import OmegaConf

    rollout = "actor_rollout_ref.rollout"
    extension = str(OmegaConf.select(_root_, f"{rollout}.engine_kwargs.vllm.worker_extension_cls"))
    return (
        OmegaConf.select(_root_, f"{rollout}.name") == "vllm"
        and OmegaConf.select(_root_, f"{rollout}.checkpoint_engine.backend") == "naive"
        and extension.startswith("verl_precision.")
    )


def _run_name(_root_: DictConfig) -> str:
    from verl_precision.rules.dtypes import engines, rollout_dtype

    train, rollout = engines(_root_)[0].compute, rollout_dtype(_root_)
    precision = train if train == rollout else f"{train}_train_{rollout}_rollout"
    weights = _root_.algorithm.rollout_correction.rollout_is
    loss = _root_.actor_rollout_ref.actor.policy_loss.loss_mode
    return "_".join([precision, loss, *([weights] if weights else [])])
