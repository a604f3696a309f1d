"""What verl 0.9.1 itself says of a composed config: its own code, called in this process, without Ray, without a GPU.

`objection` asks, in the order of a run, what verl would ask in its driver and in its workers. It is written without a
look at the rules, and imports nothing of them: the tests compare the two.
"""

import contextlib
import io
import math
import types
import warnings
from unittest.mock import Mock

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.tracking import Tracking
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.replica import RolloutReplica

# verl's replica as far as its constructor.
_Replica = type("_Replica", (RolloutReplica,), dict.fromkeys(RolloutReplica.__abstractmethods__))


def objection(config: DictConfig) -> str:
    """Return the first thing that verl refuses; empty if it refuses nothing. The config is changed, as verl does."""
    OmegaConf.set_struct(config, False)
    for question in (_driver, _registries, _workers, _replicas, _first_update):
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                question(config)
            except Exception as error:  # its answer, whatever it is
                cause = error.__cause__ or error
                return f"{question.__name__[1:]}: {type(cause).__name__}: {cause}"
    return ""


def _driver(config: DictConfig) -> None:
    if config.actor_rollout_ref.model.lora_rank and config.actor_rollout_ref.model.lora_rank <= 512:
        config.actor_rollout_ref.model.lora_rank = 0  # its rank is vLLM's, whose import takes long
    validate_config(config, need_reference_policy(config), use_critic=False)


def _registries(config: DictConfig) -> None:
    get_trainer_cls(config.trainer.v1.trainer_mode)
    core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)
    core_algos.get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    get_reward_manager_cls(config.reward.reward_manager.name)
    loggers = config.trainer.logger
    for name in loggers if OmegaConf.is_list(loggers) else [loggers]:
        assert name in Tracking.supported_backend, f"{name} is not supported"  # Tracking.__init__ says so too
    steps = config.trainer.total_training_steps
    assert steps is None or steps > 0, "by reading: `global_steps <= total_training_steps` of PPOTrainer.fit is False"


def _workers(config: DictConfig) -> None:
    """ActorRolloutRefWorker.init_model, FSDPEngine._build_module and _build_optimizer."""
    actor = config.actor_rollout_ref.actor
    mixed_precision = actor.fsdp_config.mixed_precision or {}
    for what in ("param", "reduce", "buffer"):
        PrecisionType.to_dtype(mixed_precision.get(f"{what}_dtype", "bf16"))
    PrecisionType.to_dtype(actor.fsdp_config.model_dtype)
    build_optimizer([torch.nn.Parameter(torch.zeros(1))], omega_conf_to_dataclass(actor.optim))
    assert actor.use_dynamic_bsz == config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
    if need_critic(config):
        critic = config.critic.copy()
        critic.model = None
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        omega_conf_to_dataclass(critic).validate(gpus, config.data.train_batch_size)


def _replicas(config: DictConfig) -> None:
    replica = _Replica(0, config.actor_rollout_ref.rollout, None, config.trainer.n_gpus_per_node)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert gpus % replica.world_size == 0, f"engine_workers.py:659: {gpus} is not divisible by {replica.world_size}"


def _first_update(config: DictConfig) -> None:
    """TrainingWorker.train_mini_batch and prepare_micro_batches, on sequences of full length."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    parallel = max(actor.get("ulysses_sequence_parallel_size", 1), actor.fsdp_config.ulysses_sequence_parallel_size)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // parallel
    config.trainer.critic_warmup = 0
    trainer = types.SimpleNamespace(config=config, use_critic=False, global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, ranks)
    batch = math.ceil(config.data.train_batch_size * rollout.n / multiple) * multiple
    mini_batch = actor.ppo_mini_batch_size * rollout.n
    engine = Mock(get_data_parallel_size=lambda: ranks, get_data_parallel_rank=lambda: 0)
    engine.train_mode.side_effect = _Divided
    data = TensorDict({"input_ids": torch.zeros(batch // ranks, 1)}, batch_size=batch // ranks)
    tensordict_utils.assign_non_tensor(data, mini_batch_size=mini_batch)
    with contextlib.suppress(_Divided):
        TrainingWorker.train_mini_batch(types.SimpleNamespace(engine=engine), data)
    longest = config.data.max_prompt_length + config.data.max_response_length
    dynamic = actor.use_dynamic_bsz
    cuts = [(mini_batch // ranks, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)]
    if not (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        budget = rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
        cuts.append((batch // ranks, *budget))
    for sequences, tokens, micro_batch in cuts:
        ones = torch.ones(min(sequences, 2) if dynamic else sequences, longest if dynamic else 1, dtype=torch.long)
        cut = TensorDict({"input_ids": ones, "attention_mask": ones}, batch_size=len(ones))
        asked = {"max_token_len_per_gpu": tokens, "micro_batch_size_per_gpu": micro_batch, "sp_size": parallel}
        tensordict_utils.assign_non_tensor(cut, use_dynamic_bsz=dynamic, **asked)
        prepare_micro_batches(cut)


class _Divided(Exception):
    """verl's assertions about the mini-batch have passed."""
