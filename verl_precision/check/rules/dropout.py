"""The rule of dropout: a mismatch that no precision takes away."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT
from verl_precision.base.verl_config import FSDP, engines, lora_rank
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING

MODEL = "actor_rollout_ref.model"
OF_HEADS = ("classifier", "summary", "token_dropout")  # of classifiers, and of protein models' inputs
# verl switches a module to `train` for an update, and to `eval` for old log-probs; its VeOmni engine leaves it in
# `train` for both (EngineEvalModeCtx of verl 0.9.1).
ALWAYS_TRAINS = ("veomni",)


@rule("dropout-in-update", "warning", about="the model's dropout")
def dropout_in_update(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The trainer's forward drops elements where the rollout's does not: the ratio is not 1 before any update."""
    if OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT:  # not-exact says it there
        return
    strategy = engines(config)[0].strategy
    where = "every forward of the trainer, for old log-probs too," if strategy in ALWAYS_TRAINS else "an update"
    for setting, key, rate in _rates(config, environment, strategy):
        problem = f"{where} drops {rate:.0%} of the elements ({key}), the rollout none: a mismatch in FP16 as in BF16"
        remedy = f"Set {setting}=0.0, if need be with ++."
        if setting.endswith("_path"):
            remedy = f"Set lora_dropout to 0 in {setting}'s adapter_config.json."
        yield Fault(setting, problem, "0.0", remedy, value=rate)


def _rates(config: DictConfig, environment: Environment, strategy: str) -> Iterator[tuple[str, str, float]]:
    """Yield setting, name and rate of each dropout that is above 0 in the trainer's model."""
    model = config.actor_rollout_ref.model
    over: Any = OmegaConf.to_container(model.get("override_config") or DictConfig({}))
    for key, rate in _positive({**environment.model, **over}):
        yield f"{MODEL}.override_config.{key}", key, rate
    if model.get("lora_adapter_path"):
        yield from ((f"{MODEL}.lora_adapter_path", key, rate) for key, rate in _positive(environment.adapter))
    elif lora_rank(config) and strategy not in FSDP:  # verl's FSDP engines do not read it
        yield from ((f"{MODEL}.lora.{key}", key, rate) for key, rate in _positive(model.get("lora") or {}))


def _positive(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _positive(value, f"{name}.")
        elif "drop" in str(key) and not str(key).startswith(OF_HEADS) and type(value) in (int, float) and value > 0:
            yield name, float(value)
