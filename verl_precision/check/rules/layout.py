"""Rules of the layout: what is divided over GPUs, and does not divide, or does not fit into a micro-batch.

verl asserts most of this too: in its workers, once the models are loaded, or in the first update.
"""

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, ROLLOUT, engines
from verl_precision.check.rules.rule import Environment, Fault, rule

MODEL = "actor_rollout_ref"
PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"


def _gpus(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


@rule("gpus-do-not-divide")
def gpus_do_not_divide(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A replica of vLLM, a group of Ulysses and a shard group of FSDP each have a share of the GPUs without rest."""
    rollout, gpus, per_node = config.actor_rollout_ref.rollout, _gpus(config), config.trainer.n_gpus_per_node
    if gpus < 1 or per_node < 1:
        return  # value-out-of-range
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    wrong = []
    # ActorRolloutRefWorker.init_model, RolloutReplica.__init__
    if replica < 1 or gpus % replica or replica % min(per_node, replica):
        wrong.append((PARALLEL, replica, f"a replica takes {replica} GPUs"))
    for engine in engines(config):
        if engine.strategy in FSDP:
            size = int(engine.node.get("fsdp_size", -1))
            # FSDPEngine._init_device_mesh, create_device_mesh
            for setting, over in (engine.ulysses, (f"{engine.setting}.fsdp_size", size)):
                if over == 0 or 0 < over < gpus and gpus % over or setting == engine.ulysses[0] and over > gpus:
                    wrong.append((setting, over, f"groups are of {over} GPUs"))
    divisors = ", ".join(str(number) for number in range(1, gpus + 1) if gpus % number == 0)
    for setting, over, what in wrong:
        problem = f"{what}, and {gpus} ({config.trainer.nnodes} x {per_node}) are not divided by that: the rest fail"
        remedy = f"Set {setting}={math.gcd(over, gpus)}, or change trainer.n_gpus_per_node."
        yield Fault(setting, problem, f"a divisor of {gpus}: {divisors}", remedy)


@rule("heads-do-not-divide")
def heads_do_not_divide(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """vLLM and Ulysses give each rank whole attention heads; keys and values are shared out, or copied, evenly."""
    sizes = {PARALLEL: OmegaConf.select(config, PARALLEL)} if config.actor_rollout_ref.rollout.name == "vllm" else {}
    policies = (each for each in engines(config) if each.strategy in FSDP and each.role != "critic")
    sizes |= {each.ulysses[0]: each.ulysses[1] for each in policies}
    if all(over == 1 for over in sizes.values()):
        return
    heads: Any = environment.model.get("num_attention_heads")
    kv: Any = environment.model.get("num_key_value_heads") or heads
    if not isinstance(heads, int):
        return
    # ModelConfig.verify_with_parallel_config of vLLM and the models' own classes; verl's apply_monkey_patch
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
    for setting, over in sizes.items():
        if over >= 1 and over not in fitting:
            problem = f"{heads} attention heads, {kv} of keys and values, cannot be shared evenly by {over} ranks"
            allowed = ", ".join(map(str, fitting))
            yield Fault(setting, problem, allowed, f"Set {setting}={max(n for n in fitting if n <= over)}.")


@rule("batch-does-not-divide")
def batch_does_not_divide(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Each rank gets as many sequences of a mini-batch, and cuts them into micro-batches of one size."""
    n, gpus = config.actor_rollout_ref.rollout.n, _gpus(config)
    for engine in engines(config):
        if not engine.trains or engine.strategy not in FSDP:
            continue
        path, ranks = engine.setting.rpartition(".")[0], max(gpus // engine.ulysses[1], 1)
        owner, setting = OmegaConf.select(config, path), f"{path}.ppo_mini_batch_size"
        size, micro_batch = owner.ppo_mini_batch_size, owner.get("ppo_micro_batch_size_per_gpu")
        sequences = size * n // ranks
        if size * n % ranks:  # TrainingWorker.train_mini_batch
            step = ranks // math.gcd(ranks, n)
            problem = f"{size * n} sequences (x rollout.n={n}) are not divided by {ranks} ranks, as verl asserts"
            yield Fault(setting, problem, f"a multiple of {step}", f"Set {setting}={-(-size // step) * step}.")
        elif not owner.use_dynamic_bsz and micro_batch and sequences % micro_batch:  # prepare_micro_batches
            setting, fits = f"{path}.ppo_micro_batch_size_per_gpu", math.gcd(sequences, micro_batch)
            problem = f"a rank's {sequences} sequences are not divided by it: verl asserts so after the first rollout"
            yield Fault(setting, problem, f"a divisor of {sequences}", f"Set {setting}={fits}.")
    dynamic = config.actor_rollout_ref.actor.use_dynamic_bsz
    if dynamic != config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz:  # ActorRolloutRefWorker.init_model
        problem = f"actor.use_dynamic_bsz={dynamic}: each worker asserts that both are the same"
        yield Fault(f"{ROLLOUT}.log_prob_use_dynamic_bsz", problem, str(dynamic))


@rule("token-budget-too-small")
def token_budget(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """With dynamic batch sizes verl asserts that every sequence fits into a micro-batch, after the first rollout."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    model, found = config.actor_rollout_ref, {engine.role: engine for engine in engines(config)}
    budgets = [
        ("actor", model.actor.use_dynamic_bsz, f"{MODEL}.actor.ppo_max_token_len_per_gpu"),
        ("actor", model.rollout.log_prob_use_dynamic_bsz, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        ("ref", model.ref.log_prob_use_dynamic_bsz, f"{MODEL}.ref.log_prob_max_token_len_per_gpu"),
        ("critic", config.critic.use_dynamic_bsz, "critic.ppo_max_token_len_per_gpu"),
        ("critic", config.critic.use_dynamic_bsz, "critic.ppo_infer_max_token_len_per_gpu"),
    ]
    for role, dynamic, setting in budgets:
        if role not in found or not dynamic or (tokens := OmegaConf.select(config, setting)) is None:
            continue
        least = -(-longest // found[role].ulysses[1])
        if tokens < least:
            problem = f"a sequence of {longest} tokens (prompt and response) fits into no micro-batch: verl stops at it"
            yield Fault(setting, problem, f"at least {least}", "Raise it, or shorten the responses.")
