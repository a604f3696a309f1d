"""Rules of the run as a whole: the plugin, verl's own refusals, the model, its context, groups of responses."""

import re

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, engine_kwargs, engines
from verl_precision.check.rules.rule import Environment, Faults, Machine, fault_of_error, faults_raised_by, rule, told
from verl_precision.check.rules.tables import table
from verl_precision.check.served_models import served_models, teaches
from verl_precision.integration.trainer.saving import checkpoint_settings
from verl_precision.mismatch.settings import settings_of
from verl_precision.weight_sync.settings import canary_settings, sync_settings

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# verl's estimators that compare the responses to one prompt with each other: their functions take its `index`.
GROUP_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)


@rule("plugin-not-loaded")
def plugin_not_loaded(config: DictConfig, environment: Environment) -> Faults:
    """verl loads the plugin silently or not at all."""
    if environment.plugin_policy is not None:
        yield told("plugin-not-loaded", value=environment.plugin_policy)


@rule("verl-refuses")
def verl_refuses(config: DictConfig, environment: Environment) -> Faults:
    """verl's own validators and registries say no: some before Ray starts, most in a worker."""
    yield from map(fault_of_error, environment.refusals)


@rule("setting-ignored", "warning")
def misspelt_settings(config: DictConfig, environment: Environment) -> Faults:
    """Hydra adds any name that stands in a recipe or behind a +."""
    yield from map(fault_of_error, environment.misspelt)


@rule("mismatch-settings")
def measuring(config: DictConfig, environment: Environment) -> Faults:
    """The blocks `mismatch`, `weight_sync` and `checkpoint`."""
    yield from faults_raised_by(settings_of, config)
    yield from faults_raised_by(sync_settings, config)
    yield from faults_raised_by(canary_settings, config)
    yield from faults_raised_by(checkpoint_settings, config)


def made_by_a_script(config: DictConfig) -> bool:
    """Whether the model is one that a recipe's script makes before its run."""
    return str(config.actor_rollout_ref.model.path).startswith("outputs/")


@rule("model-missing", of_machine=True)
def model_path(config: DictConfig, machine: Machine) -> Faults:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    path, hub = config.actor_rollout_ref.model.path, HUB_NAME.match(str(config.critic.model.path))
    if machine.critic_missing and not hub and any(engine.role == "critic" for engine in engines(config)):
        yield told("model-missing critic")
    for served in served_models(config):
        if served.path in machine.missing_models and not HUB_NAME.match(str(served.path)):
            yield told("model-missing no folder", setting=served.named)
    if machine.model == "folder without config.json":
        yield told("model-missing unreadable")
    elif machine.model == "nothing" and made_by_a_script(config):
        yield told("model-missing not made")
    elif machine.model == "file" or (machine.model == "nothing" and not HUB_NAME.match(str(path))):
        yield told("model-missing no folder")


@rule("model-overridden", about="override_config against config.json")
def model_overridden(config: DictConfig, environment: Environment) -> Faults:
    """`override_config` changes the trainer's model; vLLM loads the one of config.json."""
    of_vllm = OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides") or {}
    for key, value in (config.actor_rollout_ref.model.get("override_config") or {}).items():
        if key not in table("computed by"):
            continue
        own = of_vllm[key] if key in of_vllm else environment.model.get(key)
        if own is not None and own != value:
            yield told("model-overridden", key=key, own=own, given=value)


@rule("tokenizer-refused", about="the tokenizer")
def tokenizer(config: DictConfig, environment: Environment) -> Faults:
    """verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in."""
    if environment.tokenizer_problem is not None:
        yield fault_of_error(environment.tokenizer_problem)


@rule("chat-template-missing", "warning", about="the chat template")
def chat_template(config: DictConfig, environment: Environment) -> Faults:
    """verl makes prompts with a chat template, and a base model's tokenizer may have none."""
    setting = "actor_rollout_ref.model.custom_chat_template"
    if not OmegaConf.select(config, setting) and environment.model.get("has_chat_template") is False:
        yield told("chat-template-missing", setting=setting)


@rule("context-too-small")
def context(config: DictConfig, environment: Environment) -> Faults:
    """verl shortens what it asks vLLM for until it fits into the context, and says nothing."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    engine = config.actor_rollout_ref.rollout.name
    for own, node in (("", config.actor_rollout_ref.rollout), (f".engine_kwargs.{engine}", engine_kwargs(config))):
        if (length := node.get("max_model_len")) is None or length >= longest:
            continue
        yield told("context-too-small", own=own, longest=longest)


@rule("group-of-one", "warning")
def group_of_one(config: DictConfig, environment: Environment) -> Faults:
    """Estimators that compare the responses to a prompt have nothing to compare."""
    estimator = config.algorithm.adv_estimator
    unused = teaches(config) and not config.distillation.distillation_loss.use_task_rewards  # the teacher's count alone
    if config.actor_rollout_ref.rollout.n == 1 and estimator in GROUP_ESTIMATORS and not unused:
        yield told("group-of-one", estimator=estimator)
