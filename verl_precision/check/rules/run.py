"""Rules of the run as a whole: the plugin, verl's own refusals, the model, counts, and a run that is to repeat."""

import re

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import BUFFER, ROLLOUT, SEEDED, engine_kwargs, engines, is_repeatable
from verl_precision.check.rules.rule import Environment, Fault, Faults, Machine, as_faults, rule
from verl_precision.integration.trainer.saving import checkpoint_settings
from verl_precision.mismatch.settings import settings_of
from verl_precision.weight_sync.settings import canary_settings, sync_settings

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# Settings that are counts, and what fails at 0.
COUNTS = {
    "trainer.nnodes": "there is no host",
    "trainer.n_gpus_per_node": "there is no GPU",
    "data.train_batch_size": "there is no prompt in a batch",
    "data.max_prompt_length": "no prompt is that short",
    "data.max_response_length": "there is no room for a response",
    "actor_rollout_ref.rollout.n": "there is no response",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "there is no prompt in a mini-batch",
    "actor_rollout_ref.actor.ppo_epochs": "no update is made",
    "actor_rollout_ref.rollout.agent.num_workers": "nobody asks for responses",
    "reward.num_workers": "nobody scores responses",
}
# verl's estimators that compare the responses to one prompt with each other
GROUP_ESTIMATORS = ("grpo", "rloo")
# Of a run that repeats bit for bit: setting, what it may be, what would differ between two runs.
_FIXED = {
    f"{ROLLOUT}.max_num_seqs": ((1,), "a batch of other sequences rounds a sequence's logits differently"),
    f"{ROLLOUT}.enable_prefix_caching": (
        (False,),
        "a prompt is computed in whole or in part, as requests happen to come",
    ),
    "trainer.v1.trainer_mode": (
        ("sync", "vp_sync"),
        "which weights a response was drawn with depends on the machine's speed",
    ),
    "mismatch.enabled": ((True,), "verl's own trainer names prompts at random"),
    BUFFER: (("SortedReplayBuffer",), "a batch is in the order in which responses arrive"),
}


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


@rule("mismatch-settings")
def measuring(config: DictConfig, environment: Environment) -> Faults:
    """The blocks `mismatch`, `weight_sync` and `checkpoint`."""
    yield from as_faults(settings_of, config)
    yield from as_faults(sync_settings, config)
    yield from as_faults(canary_settings, config)
    yield from as_faults(checkpoint_settings, config)


@rule("model-missing", of_machine=True)
def model_path(config: DictConfig, machine: Machine) -> Faults:
    """A local model has a readable config.json; a hub name cannot be checked without network."""
    path = config.actor_rollout_ref.model.path
    hub = HUB_NAME.match(str(config.critic.model.path))
    if machine.critic_missing and not hub and any(engine.role == "critic" for engine in engines(config)):
        yield Fault(
            setting="critic.model.path",
            problem="there is a critic (critic.enable, or adv_estimator=gae), and its model is not there",
            allowed="a folder in Hugging Face format or a hub name (organisation/model)",
            remedy="Set critic.model.path, or choose an estimator without a critic.",
        )
    if machine.model == "folder without config.json":
        problem, remedy = "the folder has no readable config.json", "Check the path and its permissions."
    elif machine.model == "file" or (machine.model == "nothing" and not HUB_NAME.match(str(path))):
        problem, remedy = "no such folder, and not a hub name", "Check the spelling."
    else:
        return
    allowed = "a folder in Hugging Face format or a hub name (organisation/model)"
    yield Fault(setting="actor_rollout_ref.model.path", problem=problem, allowed=allowed, remedy=remedy)


@rule("tokenizer-refused")
def tokenizer(config: DictConfig, environment: Environment) -> Faults:
    """verl builds prompts from single tokens; a tokenizer without them fails every prompt, minutes in."""
    if environment.tokenizer_problem is not None:
        yield environment.tokenizer_problem


@rule("chat-template-missing", "warning")
def chat_template(config: DictConfig, environment: Environment) -> Faults:
    """verl makes prompts with a chat template, and a base model's tokenizer may have none."""
    setting = "actor_rollout_ref.model.custom_chat_template"
    if environment.model.get("has_chat_template") is False and OmegaConf.select(config, setting) is None:
        problem = (
            "the model's tokenizer has no chat template: no prompt can be made, and where long prompts are "
            "filtered, all are"
        )
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
        problem = (
            f"data.max_prompt_length + data.max_response_length is {longest}: verl would cut responses at what "
            "the prompt leaves of the context, without a word"
        )
        allowed, remedy = f"at least {longest}", "Leave it to the recipe, which adds the two, or shorten the responses."
        yield Fault(setting=f"{ROLLOUT}{own}.max_model_len", problem=problem, allowed=allowed, remedy=remedy)


@rule("value-out-of-range")
def value_out_of_range(config: DictConfig, environment: Environment) -> Faults:
    """Numbers with which a run fails in the middle, or does nothing."""
    for setting, effect in COUNTS.items():
        value = OmegaConf.select(config, setting)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Fault(
                setting=setting, problem=effect, allowed="a whole number >= 1", remedy=f"Set {setting}=1 or more."
            )


@rule("nothing-trained")
def nothing_trained(config: DictConfig, environment: Environment) -> Faults:
    """A run of no steps loads everything, and ends without an error."""
    trainer = config.trainer
    if trainer.get("val_only"):
        if not trainer.get("val_before_train", True):
            yield Fault(
                setting="trainer.val_before_train",
                problem="verl reads val_only=True only where it validates before training: this run trains",
                allowed="True with val_only=True",
                remedy="Set trainer.val_before_train=True.",
            )
        return
    for setting in ("trainer.total_epochs", "trainer.total_training_steps"):
        value = OmegaConf.select(config, setting)
        if value is not None and (not isinstance(value, int) or value < 1):
            problem = "the run ends before its first step, without an error"
            allowed = "a whole number >= 1; trainer.val_only=True only validates"
            yield Fault(setting=setting, problem=problem, allowed=allowed, remedy=f"Set {setting}=1 or more.")


@rule("group-of-one", "warning")
def group_of_one(config: DictConfig, environment: Environment) -> Faults:
    """Estimators that compare the responses to a prompt have nothing to compare."""
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator in GROUP_ESTIMATORS:
        problem = (
            f"adv_estimator={estimator} compares the responses to one prompt: of one alone verl takes the bare "
            "reward for the advantage, without a baseline"
        )
        setting = "actor_rollout_ref.rollout.n"
        yield Fault(setting=setting, problem=problem, allowed="2 or more", remedy="Set actor_rollout_ref.rollout.n=8.")


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Faults:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    for setting, (needed, differs) in _FIXED.items():
        if (value := OmegaConf.select(config, setting)) not in needed:
            yield Fault(
                setting=setting,
                value=value,
                problem=f"{SEEDED}=True asks for a run that repeats bit for bit, but {differs}",
                allowed=" or ".join(map(str, needed)),
                remedy=f"Set {setting}={needed[-1]}, as +repeatable=bitwise does.",
            )
    if config.data.shuffle and config.data.seed is None:
        problem = f"{SEEDED}=True asks for a run that repeats bit for bit, but prompts are shuffled at random"
        yield Fault(setting="data.seed", problem=problem, allowed="a number", remedy="Set data.seed=0.")
