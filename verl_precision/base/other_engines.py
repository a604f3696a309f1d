"""Translates the FSDP settings of presets and recipes for verl's Megatron engine.

Presets and recipes use the settings of verl's FSDP engine. With `model_engine=megatron`, verl's typed configs have no
such blocks. So each setting is replaced by the Megatron setting with the same meaning (engine_settings.yaml), before
verl reads the config. A setting that Megatron does not have, and any other engine, is an error.
"""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import FSDP, leaves

OWNERS = {"actor_rollout_ref.actor": "fsdp_config", "actor_rollout_ref.ref": "fsdp_config", "critic": "fsdp"}
_ENGINE = "megatron"
_VERLS = "bfloat16"  # the default dtype of verl's typed configs


def fit_to_engine(config: DictConfig) -> None:
    """Replace the FSDP settings of a composed config by the settings of its `model_engine`.

    A config without presets of this package, or with FSDP, stays as it is.

    Raises:
        ConfigurationError: If the engine does not support a setting, or one of its own settings contradicts it.
    """
    engine = str(config.get("model_engine", "dp"))
    if engine == "dp" or not any(OmegaConf.select(config, f"{path}.{block}") for path, block in OWNERS.items()):
        return
    if engine != _ENGINE or config.trainer.device == "cpu":
        problem = "verl's megatron engine needs GPUs"
        if engine != _ENGINE:
            problem = "presets that set a dtype or an FSDP setting are for FSDP and Megatron"
        remedy = "Choose a scale of GPUs, or model_engine=dp, verl's FSDP engine."
        raise ConfigurationError(problem, setting="model_engine", value=engine, allowed="dp", remedy=remedy)
    words = table_of(__file__, "engine_settings.yaml")
    with open_dict(config):
        for path, name in OWNERS.items():
            owner = OmegaConf.select(config, path)
            block: Any = OmegaConf.to_container(owner.pop(name, None) or OmegaConf.create(), resolve=True)
            if owner.strategy in FSDP:  # a scale preset has set it
                owner.strategy = _ENGINE
            if not block:
                continue
            for setting, value in _moved(words, f"{path}.{name}", block):
                if path.endswith(".ref") and not setting.startswith("dtype"):
                    continue  # the reference has no optimizer state, and its layout is the actor's
                _put(config, f"{path}.{setting if setting.startswith('optim.') else f'{_ENGINE}.{setting}'}", value)
            if not path.endswith(".ref"):
                _move_optimizer(words["optimizer"], owner)


def _moved(words: dict[str, Any], path: str, block: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the Megatron settings, with values, that have the meaning of a block of FSDP settings."""
    dtype = short((block.get("mixed_precision") or {}).get("param_dtype", "bf16"))
    if dtype not in words["dtypes"]:
        problem, allowed = "Megatron's typed config takes bfloat16 and float16 alone", " or ".join(words["dtypes"])
        remedy = f"Choose precision={allowed.replace(' or ', ' or precision=')}, or model_engine=dp."
        raise ConfigurationError(problem, setting="precision", value=dtype, allowed=allowed, remedy=remedy)
    yield from words["dtypes"][dtype].items()
    if block.get("offload_policy"):
        block = {**block, "param_offload": True, "optimizer_offload": True}
    moved, neutral = words["settings"], words["neutral"]
    for name, value in leaves({**block, "mixed_precision": None}):  # it has given the dtype
        if name.endswith("._target_") or value == {}:
            continue
        whole = next((each for each in moved if name == each or name.startswith(f"{each}.")), None)
        if whole is not None:
            if not name.startswith("loss_scale") or dtype == "fp16":
                yield moved[whole] + name.removeprefix(whole), value
        elif name not in neutral or neutral[name] not in (None, value):
            problem, allowed = "verl's megatron engine has no such setting", str(neutral.get(name, "not set"))
            remedy = "Leave it out with this engine, or choose model_engine=dp."
            raise ConfigurationError(problem, setting=f"{path}.{name}", value=value, allowed=allowed, remedy=remedy)


def _move_optimizer(words: dict[str, str], owner: DictConfig) -> None:
    """Replace torch's arguments of Adam by Megatron's settings."""
    own = owner.optim.get("override_optimizer_config") or OmegaConf.create()
    given = {f"betas.{place}": beta for place, beta in enumerate(owner.optim.betas)}
    given |= {"eps": own.pop("eps")} if "eps" in own else {}
    for name, value in given.items():
        _put(owner, words[name], value)


def _put(node: DictConfig, setting: str, value: Any) -> None:
    """Set a value. A recipe's own setting of this engine's optimizer stays; its own dtype must equal the preset's."""
    found = OmegaConf.select(node, setting)
    if setting.endswith(".dtype") and found not in (None, _VERLS, value):
        problem, remedy = "it contradicts the precision preset, which sets this dtype", "Remove one of the two."
        raise ConfigurationError(problem, setting=setting, value=found, allowed=str(value), remedy=remedy)
    if found is None or "override_optimizer_config" not in setting:
        OmegaConf.update(node, setting, value, force_add=True)
