"""Rules of the layout: what is divided over GPUs, and does not divide, or does not fit into a micro-batch.

verl asserts most of this too: in its workers, once the models are loaded, or in the first update. The places are those
of verl 0.9.1 and vLLM 0.28.0.
"""

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, Engine, engine_kwargs, engines, lora_is_merged, lora_rank
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule, told, told_where

ROLLOUT = "actor_rollout_ref.rollout"
PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"


def _gpus(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


@rule("gpus-do-not-divide")
def gpus_do_not_divide(config: DictConfig, environment: Environment) -> Faults:
    """A replica of vLLM, a group of Ulysses and a shard group of FSDP each have a share of the GPUs without rest."""
    rollout, gpus, per_node = config.actor_rollout_ref.rollout, _gpus(config), config.trainer.n_gpus_per_node
    if gpus < 1 or per_node < 1:
        return  # value-out-of-range
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    # ActorRolloutRefWorker.init_model, RolloutReplica.__init__
    if replica < 1 or gpus % replica or replica % min(per_node, replica):
        yield told(
            "gpus-do-not-divide replica", replica=replica, config=config, per_node=per_node, gpus=gpus,
            divisors=_divisors(gpus), fits=math.gcd(replica, gpus),
        )  # fmt: skip
    for engine in engines(config):
        if engine.strategy not in FSDP:
            continue
        size = int(engine.node.get("fsdp_size", -1))
        for setting, over in (engine.ulysses, (f"{engine.setting}.fsdp_size", size)):
            # FSDPEngine._init_device_mesh, create_device_mesh
            if over == 0 or 0 < over < gpus and gpus % over or setting == engine.ulysses[0] and over > gpus:
                yield told(
                    "gpus-do-not-divide group", setting=setting, gpus=gpus, divisors=_divisors(gpus),
                    fits=math.gcd(over, gpus),
                )  # fmt: skip


@rule("heads-do-not-divide", about="attention heads over GPUs")
def heads_do_not_divide(config: DictConfig, environment: Environment) -> Faults:
    """vLLM and Ulysses give each rank whole attention heads; keys and values are shared out, or copied, evenly."""
    sizes = {} if config.actor_rollout_ref.rollout.name != "vllm" else {PARALLEL: OmegaConf.select(config, PARALLEL)}
    for engine in engines(config):
        if engine.strategy in FSDP and engine.role != "critic":  # a critic is another model
            sizes[engine.ulysses[0]] = engine.ulysses[1]
    if all(over == 1 for over in sizes.values()):
        return
    heads, kv_heads = environment.model.get("num_attention_heads"), environment.model.get("num_key_value_heads")
    if not isinstance(heads, int):
        return
    for setting, over in sizes.items():
        # ModelConfig.verify_with_parallel_config of vLLM and the models' own classes; verl's apply_monkey_patch
        kv = kv_heads or heads
        if over >= 1 and (heads % over or kv % over and over % kv):
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
            yield told(
                "heads-do-not-divide", setting=setting, heads=heads, kv=kv, over=over,
                fitting=", ".join(map(str, fitting)), largest=max(n for n in fitting if n <= over),
            )  # fmt: skip


@rule("batch-does-not-divide")
def batch_does_not_divide(config: DictConfig, environment: Environment) -> Faults:
    """Each rank gets as many sequences of a mini-batch, and cuts them into micro-batches of one size."""
    model, n, gpus = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n, _gpus(config)
    for path, owner, engine in _trained(config):
        ranks = max(gpus // engine.ulysses[1], 1)
        sequences, setting = owner.ppo_mini_batch_size * n, f"{path}.ppo_mini_batch_size"
        micro_batch = owner.get("ppo_micro_batch_size_per_gpu")
        if sequences % ranks:  # TrainingWorker.train_mini_batch
            step = ranks // math.gcd(ranks, n)
            yield told(
                "batch-does-not-divide mini-batch", setting=setting, sequences=sequences, n=n, ranks=ranks, step=step,
                up=-(-owner.ppo_mini_batch_size // step) * step,
            )  # fmt: skip
        elif not owner.use_dynamic_bsz and micro_batch and sequences // ranks % micro_batch:
            setting, when = f"{path}.ppo_micro_batch_size_per_gpu", "in the first update, after the first rollout"
            yield _not_divided(setting, micro_batch, sequences // ranks, "mini-batch", when)
    if model.actor.use_dynamic_bsz != model.rollout.log_prob_use_dynamic_bsz:  # ActorRolloutRefWorker.init_model
        yield told("batch-does-not-divide dynamic", model=model)
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode")
    micro_batch = model.rollout.get("log_prob_micro_batch_size_per_gpu")
    ranks = _data_parallel(config)
    if model.rollout.log_prob_use_dynamic_bsz or bypass or not micro_batch:
        return
    sequences = _padded_batch(config) // ranks
    if sequences % micro_batch and model.actor.ppo_mini_batch_size * n % ranks == 0:
        setting = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        yield _not_divided(setting, micro_batch, sequences, "batch", "after the first rollout")


@rule("batch-does-not-divide")
def batches_of_prompts(config: DictConfig, environment: Environment) -> Faults:
    """verl fetches whole generation batches, and syncs a rollout on GPUs of its own after a batch's mini-batches."""
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode")).removeprefix("vp_")
    fetched, size = config.data.get("gen_batch_size") or 0, config.data.train_batch_size
    one_by_one = mode != "sync" or OmegaConf.select(config, "algorithm.filter_groups.enable")  # verl sets 1 there
    if fetched and not one_by_one and size % fetched:  # PPOTrainer._next_train_batch
        yield told("batch-does-not-divide fetched", size=size)
    if mode != "separate_async":
        return
    steps = OmegaConf.select(config, "trainer.v1.separate_async.parameter_sync_step")
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if size != steps * mini_batch:  # PPOTrainerSeparateAsync.__init__
        fits = size // mini_batch if mini_batch and size % mini_batch == 0 else 0
        fits = fits or "data.train_batch_size / actor_rollout_ref.actor.ppo_mini_batch_size"
        yield told("batch-does-not-divide sync", steps=steps, mini_batch=mini_batch, size=size, fits=fits)


def _not_divided(setting: str, micro_batch: int, sequences: int, batch: str, when: str) -> Fault:
    """Return the fault that verl's prepare_micro_batches asserts."""
    return told(
        "batch-does-not-divide micro-batch", setting=setting, sequences=sequences, batch=batch, when=when,
        fits=math.gcd(sequences, micro_batch),
    )  # fmt: skip


def _trained(config: DictConfig) -> Iterator[tuple[str, DictConfig, Engine]]:
    for engine in engines(config):
        if engine.trains and engine.strategy in FSDP:
            path = engine.setting.rpartition(".")[0]
            yield path, OmegaConf.select(config, path), engine


def _data_parallel(config: DictConfig) -> int:
    """Return over how many groups of GPUs the actor's batches are divided."""
    actor = engines(config)[0]
    parts = [actor.ulysses[1]]
    if actor.strategy == "megatron":
        parts += [actor.node.tensor_model_parallel_size, actor.node.pipeline_model_parallel_size]
    return max(_gpus(config) // math.prod(parts), 1)


def _padded_batch(config: DictConfig) -> int:
    """Return the sequences of a batch, filled up as verl does (PPOTrainer._get_required_batch_multiple)."""
    n, multiple = config.actor_rollout_ref.rollout.n, _data_parallel(config)
    for _, owner, _ in _trained(config):
        multiple = math.lcm(multiple, max(owner.ppo_mini_batch_size * n, 1))
    return -(-config.data.train_batch_size * n // multiple) * multiple


@rule("batch-is-padded", "warning")
def batch_is_padded(config: DictConfig, environment: Environment) -> Faults:
    """verl fills a batch up with synthetic sequences, which train nothing and count in the mini-batch they are in."""
    n, size = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not config.trainer.get("use_v1", True) or "rollout" in config or min(n, size, mini_batch) < 1:  # see `refused`
        return
    if (missing := _padded_batch(config) - size * n) == 0:
        return
    up, fits = -(-size // mini_batch) * mini_batch, math.gcd(size, mini_batch)
    yield told("batch-is-padded", size=size, mini_batch=mini_batch, missing=missing, up=up, fits=fits)


@rule("token-budget-too-small")
def token_budget(config: DictConfig, environment: Environment) -> Faults:
    """With dynamic batch sizes verl asserts that every sequence fits into a micro-batch, after the first rollout."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    model, found = config.actor_rollout_ref, {engine.role: engine for engine in engines(config)}
    budgets = [
        ("actor", "actor_rollout_ref.actor", model.actor.use_dynamic_bsz, "ppo_max_token_len_per_gpu"),
        ("actor", ROLLOUT, model.rollout.log_prob_use_dynamic_bsz, "log_prob_max_token_len_per_gpu"),
        ("ref", "actor_rollout_ref.ref", model.ref.log_prob_use_dynamic_bsz, "log_prob_max_token_len_per_gpu"),
        ("critic", "critic", config.critic.use_dynamic_bsz, "ppo_max_token_len_per_gpu"),
        ("critic", "critic", config.critic.use_dynamic_bsz, "ppo_infer_max_token_len_per_gpu"),
    ]
    for role, path, dynamic, budget in budgets:
        setting = f"{path}.{budget}"
        if role not in found or not dynamic or (tokens := OmegaConf.select(config, setting)) is None:
            continue
        _, parallel = found[role].ulysses
        if tokens * parallel < longest:
            yield told("token-budget-too-small", setting=setting, longest=longest, least=-(-longest // parallel))


@rule("vllm-refuses-setting", about="the length of the model's context")
def vllm_refuses_setting(config: DictConfig, environment: Environment) -> Faults:
    """What vLLM's own configuration classes refuse, minutes after Ray has started."""
    rollout, own = config.actor_rollout_ref.rollout, engine_kwargs(config)
    if rollout.name != "vllm":
        return

    def asked(key: str) -> tuple[str, Any]:
        path = f"{ROLLOUT}.engine_kwargs.vllm.{key}" if key in own else f"{ROLLOUT}.{key}"
        return path, own.get(key, rollout.get(key))

    (named, dtype), (shared, share), (sized, context) = map(asked, ("dtype", "gpu_memory_utilization", "max_model_len"))
    (room, batched), (other, sequences) = map(asked, ("max_num_batched_tokens", "max_num_seqs"))
    counts = isinstance(batched, int) and isinstance(sequences, int)
    rank, positions = lora_rank(config), None
    if isinstance(context, int):
        positions = environment.model.get("max_position_embeddings")
    yield from told_where(
        "vllm-refuses-setting",
        {
            "dtype": dtype not in VLLM_DTYPES,
            "share": not isinstance(share, int | float) or not 0 < share <= 1,
            "batched": counts and batched < sequences,
            "rank": rank > VLLM_LORA_RANK and not lora_is_merged(config),
            "positions": isinstance(positions, int) and context > positions,
        },
        named=named, dtypes=", ".join(VLLM_DTYPES), shared=shared, room=room, other=other, sequences=sequences,
        rank=rank, vllm_lora_rank=VLLM_LORA_RANK, sized=sized, positions=positions,
    )  # fmt: skip


VLLM_LORA_RANK = 512  # The largest of `MaxLoRARanks` of vllm/config/lora.py.
# `ModelDType` of vllm/config/model.py (compared by tests/check/rules/test_planted_edits.py).
VLLM_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
