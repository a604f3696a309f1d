"""Rules of the layout: what is divided over GPUs, and does not divide, or does not fit into a micro-batch.

verl asserts most of this too: in its workers, once the models are loaded, or in the first update. The places are those
of verl 0.9.1 and vLLM 0.28.0.
"""

import math
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, Engine, engine_kwargs, engines, lora_is_merged, lora_rank
from verl_precision.check.rules.rule import Environment, Fault, Faults, faults_where, rule

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
        problem = f"a replica takes {replica} GPUs, which do not divide {config.trainer.nnodes} x {per_node} GPUs"
        remedy = f"Set {PARALLEL}={math.gcd(replica, gpus)}, or change trainer.n_gpus_per_node."
        yield Fault(setting=PARALLEL, problem=problem, allowed=f"a divisor of {gpus}: {_divisors(gpus)}", remedy=remedy)
    for engine in engines(config):
        if engine.strategy not in FSDP:
            continue
        size = int(engine.node.get("fsdp_size", -1))
        for setting, over in (engine.ulysses, (f"{engine.setting}.fsdp_size", size)):
            # FSDPEngine._init_device_mesh, create_device_mesh
            if over == 0 or 0 < over < gpus and gpus % over or setting == engine.ulysses[0] and over > gpus:
                problem = f"{gpus} GPUs are not divided by it: the ranks left over fail, and the others wait"
                allowed, remedy = f"a divisor of {gpus}: {_divisors(gpus)}", f"Set {setting}={math.gcd(over, gpus)}."
                yield Fault(setting=setting, problem=problem, allowed=allowed, remedy=remedy)


@rule("heads-do-not-divide")
def heads_do_not_divide(config: DictConfig, environment: Environment) -> Faults:
    """vLLM and Ulysses give each rank whole attention heads; keys and values are shared out, or copied, evenly."""
    heads, kv_heads = environment.model.get("num_attention_heads"), environment.model.get("num_key_value_heads")
    if not isinstance(heads, int):
        return
    sizes = {} if config.actor_rollout_ref.rollout.name != "vllm" else {PARALLEL: OmegaConf.select(config, PARALLEL)}
    for engine in engines(config):
        if engine.strategy in FSDP and engine.role != "critic":  # a critic is another model
            sizes[engine.ulysses[0]] = engine.ulysses[1]
    for setting, over in sizes.items():
        # ModelConfig.verify_with_parallel_config of vLLM and the models' own classes; verl's apply_monkey_patch
        kv = kv_heads or heads
        if over >= 1 and (heads % over or kv % over and over % kv):
            fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
            problem = f"{heads} attention heads, {kv} of keys and values, cannot be shared evenly by {over} ranks"
            remedy = f"Set {setting}={max(n for n in fitting if n <= over)}."
            yield Fault(setting=setting, problem=problem, allowed=", ".join(map(str, fitting)), remedy=remedy)


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
            problem = f"{sequences} sequences (x rollout.n={n}) are not divided by {ranks} ranks, as verl asserts"
            remedy = f"Set {setting}={-(-owner.ppo_mini_batch_size // step) * step}."
            yield Fault(setting=setting, problem=problem, allowed=f"a multiple of {step}", remedy=remedy)
        elif not owner.use_dynamic_bsz and micro_batch and sequences // ranks % micro_batch:
            setting, when = f"{path}.ppo_micro_batch_size_per_gpu", "in the first update, after the first rollout"
            yield _not_divided(setting, micro_batch, sequences // ranks, "mini-batch", when)
    if model.actor.use_dynamic_bsz != model.rollout.log_prob_use_dynamic_bsz:  # ActorRolloutRefWorker.init_model
        problem = f"actor.use_dynamic_bsz={model.actor.use_dynamic_bsz}: each worker asserts that both are the same"
        allowed = str(model.actor.use_dynamic_bsz)
        yield Fault(setting=f"{ROLLOUT}.log_prob_use_dynamic_bsz", problem=problem, allowed=allowed)
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode")
    micro_batch = model.rollout.get("log_prob_micro_batch_size_per_gpu")
    ranks = max(gpus // engines(config)[0].ulysses[1], 1)
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
        problem = f"a batch of {size} prompts is no multiple of it: verl raises in the first step"
        remedy = "Set data.gen_batch_size=null."
        yield Fault("", "", "data.gen_batch_size", None, problem, f"null, or a divisor of {size}", remedy)
    if mode != "separate_async":
        return
    setting = "trainer.v1.separate_async.parameter_sync_step"
    steps, mini_batch = OmegaConf.select(config, setting), config.actor_rollout_ref.actor.ppo_mini_batch_size
    if size != steps * mini_batch:  # PPOTrainerSeparateAsync.__init__
        problem = f"{steps} mini-batches of {mini_batch} prompts are not a batch of {size}, as verl asserts"
        fits = size // mini_batch if mini_batch and size % mini_batch == 0 else 0
        allowed = str(fits) if fits else "data.train_batch_size / actor_rollout_ref.actor.ppo_mini_batch_size"
        yield Fault(setting=setting, problem=problem, allowed=allowed)


def _not_divided(setting: str, micro_batch: int, sequences: int, batch: str, when: str) -> Fault:
    """Return the fault that verl's prepare_micro_batches asserts."""
    problem = f"a rank has {sequences} sequences of a {batch}, which are not divided by it: verl asserts so {when}"
    remedy = f"Set {setting}={math.gcd(sequences, micro_batch)}."
    return Fault(setting=setting, problem=problem, allowed=f"a divisor of {sequences}", remedy=remedy)


def _trained(config: DictConfig) -> Iterator[tuple[str, DictConfig, Engine]]:
    for engine in engines(config):
        if engine.trains and engine.strategy in FSDP:
            path = engine.setting.rpartition(".")[0]
            yield path, OmegaConf.select(config, path), engine


def _padded_batch(config: DictConfig) -> int:
    """Return the sequences of a batch, filled up as verl does (PPOTrainer._get_required_batch_multiple)."""
    n, multiple = config.actor_rollout_ref.rollout.n, max(_gpus(config) // engines(config)[0].ulysses[1], 1)
    for _, owner, _ in _trained(config):
        multiple = math.lcm(multiple, max(owner.ppo_mini_batch_size * n, 1))
    return -(-config.data.train_batch_size * n // multiple) * multiple


@rule("batch-is-padded", "warning")
def batch_is_padded(config: DictConfig, environment: Environment) -> Faults:
    """verl fills a batch up with synthetic sequences, which train nothing and count in the mini-batch they are in."""
    n, size = config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not config.trainer.get("use_v1", True) or min(n, size, mini_batch) < 1:  # value-out-of-range
        return
    if (missing := _padded_batch(config) - size * n) == 0:
        return
    up = -(-size // mini_batch) * mini_batch
    smaller = f"actor_rollout_ref.actor.ppo_mini_batch_size={math.gcd(size, mini_batch)}"
    remedy = f"Set data.train_batch_size={up}, or {smaller}."
    problem = f"{size} prompts do not fill mini-batches of {mini_batch}: verl adds {missing} synthetic sequences"
    yield Fault(setting="data.train_batch_size", problem=problem, allowed=f"a multiple of {mini_batch}", remedy=remedy)


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
            problem = f"a sequence of {longest} tokens (prompt and response) fits into no micro-batch: verl stops at it"
            allowed = f"at least {-(-longest // parallel)}"
            yield Fault(setting=setting, problem=problem, allowed=allowed, remedy="Raise it, or shorten the responses.")


@rule("vllm-refuses-setting")
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
    rank, positions = lora_rank(config), environment.model.get("max_position_embeddings")
    bounded = isinstance(positions, int) and isinstance(context, int)
    yield from faults_where(
        (dtype not in VLLM_DTYPES, named, "vLLM does not know this name of a dtype, though verl's trainer may",
         ", ".join(VLLM_DTYPES)),
        (not isinstance(share, int | float) or not 0 < share <= 1, shared, "it is a share of the GPU",
         "a number above 0, and at most 1"),
        (counts and batched < sequences, room, f"vLLM wants room for a token of each of {other}={sequences} sequences",
         f"at least {sequences}"),
        (rank > VLLM_LORA_RANK and not lora_is_merged(config), "actor_rollout_ref.model.lora_rank", "vLLM serves "
         f"no adapter of rank {rank}, and verl refuses to start", f"at most {VLLM_LORA_RANK}"),
        (bounded and context > positions, sized, "the model has fewer positions (max_position_embeddings), and verl's "
         "server refuses to start", f"at most {positions}"),
        remedy="Correct {}, or leave it as the recipe and its presets have it.",
    )  # fmt: skip


VLLM_LORA_RANK = 512  # The largest of `MaxLoRARanks` of vllm/config/lora.py.
# `ModelDType` of vllm/config/model.py (compared by tests/check/rules/test_planted_edits.py).
VLLM_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
