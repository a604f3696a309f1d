"""Rules of exact arithmetic, in which both engines must round in the same way, and of stochastic rounding."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT, HALF, long
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ROLLOUT, engines, rollout_dtype, sync_backend
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING, FAMILIES, refused, require_family

MODEL = "actor_rollout_ref.model"
ROUNDING = "weight_sync.rounding"
_ROWS: dict[str, list[tuple[str, list[object], str]]] = table_of(__file__)


@rule("not-exact")
def not_exact(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """This package's arithmetic supports some families of models; with `exact`, both engines must round alike."""
    arithmetic = OmegaConf.select(config, ARITHMETIC_SETTING)
    if arithmetic in (None, "native"):
        return
    if arithmetic == EXACT:
        yield from _otherwise_in_one_engine(config)
    for setting, model in ((MODEL, environment.model), ("critic.model", environment.critic)):
        if error := _refusal(model, bool(OmegaConf.select(config, f"{setting}.trust_remote_code"))):
            problem = f"arithmetic={arithmetic} rounds each operation once, but {error.problem}"
            yield Fault(f"{setting}.path", problem, error.allowed, error.remedy)


def _otherwise_in_one_engine(config: DictConfig) -> Iterator[Fault]:
    asked, trained, rows = "arithmetic=exact needs equal log-probs, but", engines(config), [*_ROWS["needed"]]
    for engine in trained:
        rows += [
            (f"{engine.setting}.{setting}", values, otherwise) for setting, values, otherwise in _ROWS["of_engine"]
        ]
        rows.append((engine.ulysses[0], [None, 1], "each rank rounds its own part of a sequence"))
    for setting, values, otherwise in rows:
        if OmegaConf.select(config, setting) not in values:
            allowed = ["null" if value is None else str(value) for value in values]
            remedy = f"Set {setting}={allowed[-1]}, or choose arithmetic=native."
            yield Fault(setting, f"{asked} {otherwise}", " or ".join(allowed), remedy)
    if (dtype := trained[0].compute) != rollout_dtype(config):
        yield Fault(f"{ROLLOUT}.dtype", f"{asked} the trainer rounds to {dtype}", long(dtype))


def _refusal(model: Mapping[str, Any], brings_code: bool) -> ConfigurationError | None:
    """Return why a model's operations cannot be rounded once, by its `config.json`; None if they can, or without it."""
    if not (kind := model.get("model_type")):
        return None
    from transformers import AutoConfig

    try:
        if model.get("quantization_config"):
            raise refused("the model's weights are quantised", "weights of 16 or 32 bits")
        if brings_code and model.get("auto_map"):
            raise refused("the model brings its own modules", "trust_remote_code=False")
        require_family(AutoConfig.for_model(**model) if kind in FAMILIES else SimpleNamespace(model_type=kind))
    except ConfigurationError as error:
        return error
    return None


@rule("stochastic-rounding")
def stochastic_rounding(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Only this package's engine rounds weights at random, from FP32 to 16 bits."""
    if OmegaConf.select(config, ROUNDING) != "stochastic":
        return
    actor, rollout, backend = engines(config)[0], rollout_dtype(config), sync_backend(config)
    if not (actor.our_fsdp and actor.master == "fp32"):
        problem = f"the actor is verl's own engine, or has {actor.master} weights: nothing is rounded"
        instead = "Choose a precision preset (precision=fp32_train_bf16_rollout)"
    elif rollout not in HALF or config.actor_rollout_ref.rollout.get("quantization"):
        problem = f"weights are rounded to {' or '.join(HALF)}, and the rollout is quantised or holds {rollout}"
        instead = f"Set {ROLLOUT}.dtype to bfloat16 or float16"
    elif backend.startswith("delta"):
        problem = f"checkpoint_engine.backend={backend} sends differences of weights, and verl rounds those itself"
        instead = "Choose another backend"
    else:
        return
    yield Fault(ROUNDING, problem, "nearest in this run", f"{instead}, or set {ROUNDING}=nearest.")
