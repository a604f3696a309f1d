"""Rules of the run as a whole: the plugin, verl's own refusals, the model, context, heads, batches, token budgets."""

import math
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import FSDP, MODEL, ROLLOUT, engine_kwargs, engines, teaches
from verl_precision.check.rules.rule import Environment, Fault, Machine, fault_of_error, faults_raised_by, rule
from verl_precision.check.rules.tables import ANSWER_REWARDS, REWARD
from verl_precision.integration.trainer.saving import checkpoint_settings
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.weight_sync.settings import canary_settings, sync_settings

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_KNOWN = table_of(__file__)
GROUP_ESTIMATORS, COMPUTED_BY = _KNOWN["group_estimators"], _KNOWN["computed_by"]


@rule("plugin-not-loaded")
def plugin_not_loaded(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl loads the plugin silently or not at all."""
    if (policy := environment.plugin_policy) is not None:
        yield Fault.worded("plugin-not-loaded", "VERL_USE_EXTERNAL_PLUGINS", value=policy)


@rule("verl-refuses")
def verl_refuses(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's own validators and registries refuse the config: some before Ray starts, most in a worker."""
    yield from map(fault_of_error, environment.refusals)


@rule("setting-ignored", "warning")
def misspelt_settings(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Hydra accepts any name in a recipe or after a +."""
    yield from map(fault_of_error, environment.misspelt)


@rule("model-overridden")
def model_overridden(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """`override_config` changes the trainer's model; vLLM loads the model of config.json."""
    of_vllm = OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides") or {}
    for key, value in (config.actor_rollout_ref.model.get("override_config") or {}).items():
        if key not in COMPUTED_BY:
            continue
        own = of_vllm[key] if key in of_vllm else environment.model.get(key)
        if own is not None and own != value:
            setting = f"{MODEL}.override_config.{key}"
            yield Fault.worded("model-overridden", setting, own=str(own), key=key, new=value)


@rule("mismatch-settings")
def measuring(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The settings of the blocks `mismatch`, `weight_sync` and `checkpoint` are valid."""
    for settings in (MismatchSettings.from_config, sync_settings, canary_settings, checkpoint_settings):
        yield from faults_raised_by(settings, config)


def made_by_a_script(config: DictConfig) -> bool:
    """Return whether a recipe's script makes the model before its run."""
    return str(config.actor_rollout_ref.model.path).startswith("outputs/")


@rule("model-missing", of_machine=True)
def model_path(config: DictConfig, machine: Machine) -> Iterator[Fault]:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    path = f"{MODEL}.path"
    for setting in sorted(machine.missing_models):
        if setting == path and made_by_a_script(config):
            yield Fault.worded("model-missing/not made yet", path)
        elif not HUB_NAME.match(str(OmegaConf.select(config, setting))):
            yield Fault.worded("model-missing", setting)
    if machine.unreadable_model:
        yield Fault.worded("model-missing/unreadable", path)


@rule("context-too-small")
def context(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl silently cuts responses to the context's length, and the model must have that many positions."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    engine = f"{ROLLOUT}.engine_kwargs.{config.actor_rollout_ref.rollout.name}"
    for place, node in ((ROLLOUT, config.actor_rollout_ref.rollout), (engine, engine_kwargs(config))):
        if not isinstance(length := node.get("max_model_len"), int):
            continue
        setting, positions = f"{place}.max_model_len", environment.model.get("max_position_embeddings")
        if length < longest:
            yield Fault.worded("context-too-small", setting, longest=longest)
        elif isinstance(positions, int) and length > positions:
            yield Fault.worded("context-too-small/positions", setting, positions=positions)


@rule("group-of-one", "warning")
def group_of_one(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Estimators that compare the responses to a prompt have nothing to compare."""
    estimator = config.algorithm.adv_estimator
    unused = teaches(config) and not config.distillation.distillation_loss.use_task_rewards  # only the teacher counts
    if config.actor_rollout_ref.rollout.n == 1 and estimator in GROUP_ESTIMATORS and not unused:
        yield Fault.worded("group-of-one", f"{ROLLOUT}.n", estimator=estimator)


@rule("filter-metric", "warning")
def filter_metric(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Dynamic sampling drops a group whose rewards, with every penalty, are equal; graded rewards rarely are."""
    setting, reward = "algorithm.filter_groups.metric", OmegaConf.select(config, f"{REWARD}.path")
    metric, graded = OmegaConf.select(config, setting), reward is not None and reward not in ANSWER_REWARDS
    shortened = OmegaConf.select(config, "reward.reward_kwargs.overlong_buffer_cfg.enable") and metric == "reward"
    known = OmegaConf.select(config, "reward.reward_model.enable") or shortened
    asked = OmegaConf.select(config, "algorithm.filter_groups.enable") and metric in ("reward", "score")
    if not asked or not (known or graded):
        return
    yield Fault.worded("filter-metric", setting, severity="warning" if known else "unchecked")


@rule("heads-do-not-divide")
def heads_do_not_divide(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """vLLM and Ulysses give each rank whole attention heads; keys and values are shared out, or copied, evenly."""
    rollout = config.actor_rollout_ref.rollout
    sizes = {f"{ROLLOUT}.tensor_model_parallel_size": rollout.tensor_model_parallel_size}
    sizes = sizes if rollout.name == "vllm" else {}
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
            fits, most = ", ".join(map(str, fitting)), max(n for n in fitting if n <= over)
            yield Fault.worded("heads-do-not-divide", setting, heads=heads, kv=kv, over=over, fits=fits, most=most)


@rule("batch-does-not-divide")
def batch_does_not_divide(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Each rank gets the same number of sequences of a mini-batch, and cuts them into micro-batches of one size."""
    n, gpus = config.actor_rollout_ref.rollout.n, config.trainer.nnodes * config.trainer.n_gpus_per_node
    for engine in engines(config):
        if not engine.trains or engine.strategy not in FSDP:
            continue
        path, ranks = engine.setting.rpartition(".")[0], max(gpus // engine.ulysses[1], 1)
        owner, setting = OmegaConf.select(config, path), f"{path}.ppo_mini_batch_size"
        size, micro_batch = owner.ppo_mini_batch_size, owner.get("ppo_micro_batch_size_per_gpu")
        sequences = size * n // ranks
        if size * n % ranks:  # TrainingWorker.train_mini_batch
            step = ranks // math.gcd(ranks, n)
            fits = -(-size // step) * step
            yield Fault.worded("batch-does-not-divide", setting, all=size * n, n=n, ranks=ranks, step=step, fits=fits)
        elif not owner.use_dynamic_bsz and micro_batch and sequences % micro_batch:  # prepare_micro_batches
            setting, fits = f"{path}.ppo_micro_batch_size_per_gpu", math.gcd(sequences, micro_batch)
            yield Fault.worded("batch-does-not-divide/micro-batch", setting, sequences=sequences, fits=fits)
    dynamic = config.actor_rollout_ref.actor.use_dynamic_bsz
    if dynamic != config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz:  # ActorRolloutRefWorker.init_model
        yield Fault.worded("batch-does-not-divide/dynamic", f"{ROLLOUT}.log_prob_use_dynamic_bsz", dynamic=dynamic)


@rule("token-budget-too-small")
def token_budget(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """With dynamic batch sizes verl asserts that every sequence fits into a micro-batch, after the first rollout."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    model, found = config.actor_rollout_ref, {engine.role: engine for engine in engines(config)}
    budgets = [
        ("actor", model.actor.use_dynamic_bsz, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ("actor", model.rollout.log_prob_use_dynamic_bsz, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        ("ref", model.ref.log_prob_use_dynamic_bsz, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
        ("critic", config.critic.use_dynamic_bsz, "critic.ppo_max_token_len_per_gpu"),
        ("critic", config.critic.use_dynamic_bsz, "critic.ppo_infer_max_token_len_per_gpu"),
    ]
    for role, dynamic, setting in budgets:
        if role not in found or not dynamic or (tokens := OmegaConf.select(config, setting)) is None:
            continue
        least = -(-longest // max(found[role].ulysses[1], 1))
        if tokens < least:
            yield Fault.worded("token-budget-too-small", setting, longest=longest, least=least)
