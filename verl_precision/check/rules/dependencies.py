"""Rules of what belongs together: modules and model, overlong buffer and reward manager, filter and reward."""

import re
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, engines, lora_rank
from verl_precision.check.rules.files import ANSWER_REWARDS, REWARD
from verl_precision.check.rules.rule import Environment, Fault, Severity, rule

FILTER = "algorithm.filter_groups"
MODEL = "actor_rollout_ref.model"
SHAPING = "reward.reward_kwargs"
BUFFER = f"{SHAPING}.overlong_buffer_cfg"
# What a layer's linear modules are called in these architectures of transformers.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@rule("name-unknown", about="target_modules of the adapter")
def lora_modules(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """PEFT trains the modules that it finds, and raises only if there is none."""
    targets = config.actor_rollout_ref.model.target_modules
    if not lora_rank(config) or engines(config)[0].strategy not in FSDP or targets is None:
        return
    if str(targets).lower() == "all-linear" or (kind := environment.model.get("model_type")) not in FAMILIES:
        return
    names = [f"model.layers.0.{name}" for name in LINEAR]
    if isinstance(targets, str):  # a pattern, for the whole name
        wrong = [] if matches_one(targets, names) else [targets]
    else:
        ends = {name.rpartition(".")[2] for name in names} | {"embed_tokens", "lm_head", "gate"}
        wrong = [str(target) for target in targets if str(target).rpartition(".")[2] not in ends]
    if wrong:
        setting, problem = f"{MODEL}.target_modules", f"a {kind} has no modules {', '.join(wrong)}: nobody trains them"
        yield Fault(setting, problem, "all-linear, or names such as [q_proj,v_proj]", f"Set {setting}=all-linear.")


def matches_one(pattern: str, names: list[str]) -> bool:
    """Return whether a pattern fits one of these names as a whole."""
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error:  # no pattern at all: PEFT raises it
        return False


@rule("overlong-buffer")
def overlong_buffer(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The buffer belongs to the reward manager `dapo`, and to the length of a response."""
    shaping = OmegaConf.select(config, SHAPING) or {}
    buffer, longest = shaping.get("overlong_buffer_cfg") or {}, config.data.max_response_length
    if not buffer.get("enable"):
        return
    manager = config.reward.reward_manager
    if manager.get("source", "register") == "register" and manager.name != "dapo":
        problem = "this reward manager ignores the overlong buffer that is switched on: long responses cost nothing"
        yield Fault("reward.reward_manager.name", problem, "dapo")
    elif shaping.get("max_resp_len") != longest:
        problem = "the overlong buffer ends there, and responses elsewhere (data.max_response_length); null is refused"
        yield Fault(f"{SHAPING}.max_resp_len", problem, str(longest))


@rule("filter-metric")
def filter_metric(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Dynamic sampling needs a value that the reward returns, and that is equal where responses are equally right.

    verl's metric `reward` is the reward that is trained on, with every penalty. verl reads it after the first rollout.
    """
    setting, reward = f"{FILTER}.metric", OmegaConf.select(config, f"{REWARD}.path")
    metric, judged = OmegaConf.select(config, setting), OmegaConf.select(config, "reward.reward_model.enable")
    if not OmegaConf.select(config, f"{FILTER}.enable"):
        return
    own = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path") or metric in (None, "acc", "reward")
    if not own and not (metric == "score" and (reward is None or "boxed_answer" in reward)):
        registered = OmegaConf.select(config, "reward.reward_manager.source") == "register"
        known = registered and (reward is None or reward in ANSWER_REWARDS)  # a user's own may return anything
        severity: Severity = "error" if known else "warning"
        problem = "the reward has to return it: else the replay buffer raises after the first rollout"
        allowed = "acc, reward, or a key of the dictionary that the reward function returns"
        yield Fault(setting, problem, allowed, f"Set {setting}=acc.", severity=severity)
    if metric in ("reward", "score"):
        severity, problem = "warning", ""
        if judged:
            problem = "a reward model gives every response its own"
        elif metric == "reward" and OmegaConf.select(config, f"{BUFFER}.enable"):
            problem = "the overlong buffer shortens it by length"
        elif reward is not None and reward not in ANSWER_REWARDS:
            severity, problem = "unchecked", "whether it gives more than right and wrong is not known; if it does"
        if problem:
            problem += ": groups that are right, or wrong, throughout are not dropped"
            remedy = f"Set {setting}=acc, or name such a key."
            yield Fault(setting, problem, "acc, or a key that says right or wrong", remedy, severity=severity)
