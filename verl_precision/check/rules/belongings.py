"""Rules of what belongs together: modules and model, overlong buffer and reward manager, filter and reward."""

import re

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, engines, lora_rank
from verl_precision.check.rules.files import ANSWER_REWARDS, REWARD
from verl_precision.check.rules.rule import Environment, Fault, Faults, Severity, rule, told

FILTER = "algorithm.filter_groups"
MODEL = "actor_rollout_ref.model"
SHAPING = "reward.reward_kwargs"
# What a layer's linear modules are called in these architectures of transformers.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@rule("name-unknown", about="target_modules of the adapter")
def lora_modules(config: DictConfig, environment: Environment) -> Faults:
    """PEFT trains the modules that it finds, and raises only if there is none."""
    targets = config.actor_rollout_ref.model.target_modules
    if not lora_rank(config) or engines(config)[0].strategy not in FSDP or targets is None:
        return
    if str(targets).lower() == "all-linear" or environment.model.get("model_type") not in FAMILIES:
        return
    names = [f"model.layers.0.{name}" for name in LINEAR]
    if isinstance(targets, str):  # a pattern, for the whole name
        wrong = [] if matches_one(targets, names) else [targets]
    else:
        ends = {name.rpartition(".")[2] for name in names} | {"embed_tokens", "lm_head", "gate"}
        wrong = [str(target) for target in targets if str(target).rpartition(".")[2] not in ends]
    if wrong:
        yield told("name-unknown modules", environment=environment, wrong=", ".join(wrong))


def matches_one(pattern: str, names: list[str]) -> bool:
    """Return whether a pattern fits one of these names as a whole."""
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error:  # no pattern at all: PEFT raises it
        return False


@rule("overlong-buffer")
def overlong_buffer(config: DictConfig, environment: Environment) -> Faults:
    """The buffer belongs to the reward manager `dapo`, which asserts its bounds in the reward workers."""
    shaping = OmegaConf.select(config, SHAPING) or {}
    buffer, longest = shaping.get("overlong_buffer_cfg") or {}, shaping.get("max_resp_len")
    if not buffer.get("enable"):
        return
    manager, setting = config.reward.reward_manager, f"{SHAPING}.overlong_buffer_cfg.len"
    if manager.get("source", "register") == "register" and manager.name != "dapo":
        yield told("overlong-buffer manager")
    elif longest != config.data.max_response_length:
        yield told("overlong-buffer longest", config=config)
    elif not 0 < (buffer.get("len") or 0) <= longest:
        yield told("overlong-buffer length", setting=setting, longest=longest, fifth=max(longest // 5, 1))


@rule("filter-metric")
def filter_metric(config: DictConfig, environment: Environment) -> Faults:
    """Dynamic sampling reads a value that the reward has returned, after the first rollout; verl's own sampler does."""
    metric, reward = OmegaConf.select(config, f"{FILTER}.metric"), OmegaConf.select(config, f"{REWARD}.path")
    own = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    if not OmegaConf.select(config, f"{FILTER}.enable") or own or metric in ("acc", "reward"):
        return
    registered = OmegaConf.select(config, "reward.reward_manager.source") == "register"
    known = registered and (reward is None or reward in ANSWER_REWARDS)  # a user's own may return anything
    if metric == "score" and (reward is None or "boxed_answer" in reward):
        return
    severity: Severity = "error" if known or not metric else "warning"
    yield told("filter-metric", severity=severity)


@rule("filter-metric", "warning")
def filter_by_shaped_reward(config: DictConfig, environment: Environment) -> Faults:
    """Dynamic sampling drops groups whose values are all equal; with a shaped reward none are.

    verl's metric `reward` is the reward that is trained on, with every penalty; a user's function is not looked into.
    """
    setting, reward = f"{FILTER}.metric", OmegaConf.select(config, f"{REWARD}.path")
    metric = OmegaConf.select(config, setting)
    if not OmegaConf.select(config, f"{FILTER}.enable") or metric not in ("reward", "score"):
        return
    shaping = OmegaConf.select(config, f"{SHAPING}.overlong_buffer_cfg.enable") and metric == "reward"
    shaped = "the overlong buffer shortens it by length" if shaping else ""
    if OmegaConf.select(config, "reward.reward_model.enable"):
        shaped = "a reward model gives every response its own"
    allowed, remedy = "acc, or a key that says right or wrong", f"Set {setting}=acc, or name such a key."
    if shaped:
        problem = f"{shaped}: groups that are right, or wrong, throughout are not dropped"
        yield Fault(setting=setting, problem=problem, allowed=allowed, remedy=remedy)
    elif reward is not None and reward not in ANSWER_REWARDS:
        problem = (
            "whether the reward function gives more than right and wrong is not known: with partial rewards, groups "
        )
        problem += "that are right, or wrong, throughout are not dropped"
        yield Fault(severity="unchecked", setting=setting, problem=problem, allowed=allowed, remedy=remedy)
