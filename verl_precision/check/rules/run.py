"""Rules of the run as a whole: the plugin, verl's own refusals, the model, its context, groups of responses."""

import re

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, engine_kwargs, engines
from verl_precision.check.rules.rule import Environment, Fault, Faults, Machine, as_faults, rule
from verl_precision.integration.trainer.saving import checkpoint_settings
from verl_precision.mismatch.settings import settings_of
from verl_precision.weight_sync.settings import canary_settings, sync_settings

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
GROUP_ESTIMATORS = ("grpo", "rloo")  # verl's estimators that compare the responses to one prompt with each other
# Keys of config.json that decide what a model computes.
COMPUTED_BY = frozenset(
    """
    head_dim hidden_act hidden_size intermediate_size moe_intermediate_size norm_topk_prob num_attention_heads
    num_experts num_experts_per_tok num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window tie_word_embeddings vocab_size
    """.split()
)


@rule("plugin-not-loaded")
def plugin_not_loaded(config: DictConfig, environment: Environment) -> Faults:
    """verl loads the plugin silently or not at all."""
    if environment.plugin_policy is not None:
        setting, allowed = "VERL_USE_EXTERNAL_PLUGINS", "auto, or a list that contains verl_precision"
        problem = "the plugin verl_precision.plugin is not loaded, so nothing of this package is registered with verl"
        remedy = "Run `verl-precision check` to see why."
        yield Fault(setting=setting, value=environment.plugin_policy, problem=problem, allowed=allowed, remedy=remedy)


@rule("verl-refuses")
def verl_refuses(config: DictConfig, environment: Environment) -> Faults:
    """verl's own validators and registries say no: some before Ray starts, most in a worker."""
    yield from environment.refusals


@rule("setting-ignored", "warning")
def misspelt_settings(config: DictConfig, environment: Environment) -> Faults:
    """Hydra adds any name that stands in a recipe or behind a +."""
    yield from environment.misspelt


@rule("mismatch-settings")
def measuring(config: DictConfig, environment: Environment) -> Faults:
    """The blocks `mismatch`, `weight_sync` and `checkpoint`."""
    yield from as_faults(settings_of, config)
    yield from as_faults(sync_settings, config)
    yield from as_faults(canary_settings, config)
    yield from as_faults(checkpoint_settings, config)


def made_by_a_script(config: DictConfig) -> bool:
    """Whether the model is one that a recipe's script makes before its run."""
    return str(config.actor_rollout_ref.model.path).startswith("outputs/")


@rule("model-missing", of_machine=True)
def model_path(config: DictConfig, machine: Machine) -> Faults:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    path, allowed = config.actor_rollout_ref.model.path, "a folder in Hugging Face format or a hub name (owner/model)"
    hub = HUB_NAME.match(str(config.critic.model.path))
    if machine.critic_missing and not hub and any(engine.role == "critic" for engine in engines(config)):
        problem = "there is a critic (critic.enable, or adv_estimator=gae), and its model is not there"
        remedy = "Set critic.model.path, or choose an estimator without a critic."
        yield Fault(setting="critic.model.path", problem=problem, allowed=allowed, remedy=remedy)
    if machine.model == "folder without config.json":
        problem, remedy = "the folder has no readable config.json", "Check the path and its permissions."
    elif machine.model == "nothing" and made_by_a_script(config):
        problem, remedy = "it is not made yet", "Start the recipe's own script: it makes the model first."
    elif machine.model == "file" or (machine.model == "nothing" and not HUB_NAME.match(str(path))):
        problem, remedy = "no such folder, and not a hub name", "Check the spelling."
    else:
        return
    yield Fault(setting="actor_rollout_ref.model.path", problem=problem, allowed=allowed, remedy=remedy)


@rule("model-overridden")
def model_overridden(config: DictConfig, environment: Environment) -> Faults:
    """`override_config` changes the trainer's model; vLLM loads the one of config.json."""
    told = OmegaConf.select(config, f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides") or {}
    for key, value in (config.actor_rollout_ref.model.get("override_config") or {}).items():
        own = told.get(key, environment.model.get(key))
        if key in COMPUTED_BY and own is not None and own != value:
            problem = f"the model has {own}; verl tells its trainer only, and the rollout computes another model"
            remedy = f"Remove it, or tell vLLM too: +{ROLLOUT}.engine_kwargs.vllm.hf_overrides.{key}={value}."
            setting = f"actor_rollout_ref.model.override_config.{key}"
            yield Fault(setting=setting, problem=problem, allowed=str(own), remedy=remedy)


@rule("tokenizer-refused")
def tokenizer(config: DictConfig, environment: Environment) -> Faults:
    """verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in."""
    if environment.tokenizer_problem is not None:
        yield environment.tokenizer_problem


@rule("chat-template-missing", "warning")
def chat_template(config: DictConfig, environment: Environment) -> Faults:
    """verl makes prompts with a chat template, and a base model's tokenizer may have none."""
    setting = "actor_rollout_ref.model.custom_chat_template"
    if environment.model.get("has_chat_template") is False and not OmegaConf.select(config, setting):
        problem = "the model's tokenizer has no chat template: no prompt can be made"
        remedy = "Leave it as the recipe has it, or give one that fits the prompts."
        yield Fault(setting=setting, problem=problem, allowed="a template in Jinja", remedy=remedy)


@rule("context-too-small")
def context(config: DictConfig, environment: Environment) -> Faults:
    """verl shortens what it asks vLLM for until it fits into the context, and says nothing."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    engine = config.actor_rollout_ref.rollout.name
    for own, node in (("", config.actor_rollout_ref.rollout), (f".engine_kwargs.{engine}", engine_kwargs(config))):
        if (length := node.get("max_model_len")) is None or length >= longest:
            continue
        problem = f"prompt and response take {longest}: verl would cut responses at the context, without a word"
        allowed, remedy = f"at least {longest}", "Leave it to the recipe, which adds the two, or shorten the responses."
        yield Fault(setting=f"{ROLLOUT}{own}.max_model_len", problem=problem, allowed=allowed, remedy=remedy)


@rule("group-of-one", "warning")
def group_of_one(config: DictConfig, environment: Environment) -> Faults:
    """Estimators that compare the responses to a prompt have nothing to compare."""
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        problem = f"adv_estimator={estimator} compares responses: of one alone the advantage is the reward itself"
        setting = "actor_rollout_ref.rollout.n"
        yield Fault(setting=setting, problem=problem, allowed="2 or more", remedy="Set actor_rollout_ref.rollout.n=8.")
