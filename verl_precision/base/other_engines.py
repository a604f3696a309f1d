"""Presets and recipes with verl's other training engines: their FSDP settings, said in the words of the chosen one.

Presets and recipes state what they want in the settings of verl's FSDP engine. With `model_engine=megatron`, `veomni`
or `torchtitan`, verl's typed configs have no such blocks. Before verl gets the config, each setting is moved to the one
that says the same there (engine_settings.yaml). What an engine cannot do is refused by name.
"""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import FSDP

OWNERS = {"actor_rollout_ref.actor": "fsdp_config", "actor_rollout_ref.ref": "fsdp_config", "critic": "fsdp"}
_VERLS = "bfloat16"  # what verl's typed configs have where no dtype was chosen


def fit_to_engine(config: DictConfig) -> list[ConfigurationError]:
    """Move the FSDP settings of a composed config to those of `model_engine`; return what could not be said there.

    A config without presets of this package, or with FSDP, stays as it is.

    Raises:
        ConfigurationError: If the engine cannot do what a setting asks for, or its own setting says otherwise.
    """
    engine = str(config.get("model_engine", "dp"))
    if engine == "dp" or not any(OmegaConf.select(config, f"{path}.{block}") for path, block in OWNERS.items()):
        return []
    tables = table_of(__file__, "engine_settings.yaml")
    words, neutral = tables.get(engine), tables["neutral"]
    if words is None or config.trainer.device == "cpu":
        problem = f"verl's {engine} engine needs GPUs" if words else "this package has no presets for this engine"
        remedy = "Choose a scale of GPUs, or model_engine=dp, verl's FSDP engine."
        raise ConfigurationError(problem, setting="model_engine", value=engine, allowed="dp", remedy=remedy)
    said: list[ConfigurationError] = []
    with open_dict(config):
        for path, name in OWNERS.items():
            owner = OmegaConf.select(config, path)
            block: Any = OmegaConf.to_container(owner.pop(name, None) or OmegaConf.create(), resolve=True)
            if owner.strategy in FSDP:  # a scale has chosen it
                owner.strategy = engine
            if not block:
                continue
            for setting, value in _moved(engine, words, neutral, f"{path}.{name}", block):
                if path.endswith(".ref") and not setting.startswith(("dtype", "mixed_precision")):
                    continue  # it has no state and no optimizer, and its layout is the actor's
                _put(config, f"{path}.{setting if setting.startswith('optim.') else f'{engine}.{setting}'}", value)
            said += [] if path.endswith(".ref") else _optimizer(words, engine, path, owner)
    return said


def _moved(engine: str, words: dict, neutral: dict, path: str, block: dict) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the engine, with values, that say what the block of FSDP's says."""
    dtype = short((block.get("mixed_precision") or {}).get("param_dtype", "bf16"))
    if dtype not in words["dtypes"]:
        allowed = " or ".join(words["dtypes"])
        remedy = f"Choose precision={allowed.replace(' or ', ' or precision=')}, or model_engine=dp."
        raise ConfigurationError(words["refused"], setting="precision", value=dtype, allowed=allowed, remedy=remedy)
    yield from words["dtypes"][dtype].items()
    if block.get("offload_policy"):
        block = {**block, "param_offload": True, "optimizer_offload": True}
    moved = words["settings"]
    for name, value in _flat(block):
        whole = next((each for each in moved if name == each or name.startswith(f"{each}.")), None)
        if whole is not None:
            if not name.startswith("loss_scale") or dtype == "fp16":
                yield moved[whole] + name.removeprefix(whole), value
        elif name not in neutral or neutral[name] not in (None, value):
            problem, allowed = f"verl's {engine} engine has nothing of the kind", str(neutral.get(name, "not set"))
            remedy = "Leave it out with this engine, or choose model_engine=dp."
            raise ConfigurationError(problem, setting=f"{path}.{name}", value=value, allowed=allowed, remedy=remedy)


def _optimizer(words: dict[str, Any], engine: str, path: str, owner: DictConfig) -> list[ConfigurationError]:
    """Say torch's arguments of Adam in the engine's words; return those that it does not read."""
    optim = owner.optim
    given: Any = OmegaConf.to_container(optim.get("override_optimizer_config") or OmegaConf.create(), resolve=True)
    named = {"override_optimizer_config.eps": ("eps", given["eps"])} if "eps" in given else {}
    if engine == "megatron":
        named |= {f"betas.{place}": (f"betas.{place}", beta) for place, beta in enumerate(optim.betas)}
    unread = []
    for name, (key, value) in named.items():
        setting = words["optimizer"].get(key)
        if setting is None:
            problem, remedy = f"verl's {engine} engine does not read it", "Nothing, or model_engine=dp."
            said = {"allowed": "the engine's own", "remedy": remedy}
            unread.append(ConfigurationError(problem, setting=f"{path}.optim.{name}", value=value, **said))
        else:
            _put(owner, setting, value)
        if key in given:
            del optim.override_optimizer_config[key]
    for setting, (verls, problem) in words.get("differs", {}).items():
        if OmegaConf.select(owner, setting) == verls:
            said = {"allowed": "a schedule that is meant", "remedy": "Say which one is meant."}
            unread.append(ConfigurationError(problem, setting=f"{path}.{setting}", value=verls, **said))
    if engine == "torchtitan" and not optim.get("override_optimizer_config"):  # its typed config has no such block
        optim.pop("override_optimizer_config", None)
    return unread


def _put(node: DictConfig, setting: str, value: Any) -> None:
    """Set a value; a recipe's own word about this engine's optimizer stays, and its own dtype must be the preset's."""
    found = OmegaConf.select(node, setting)
    if setting.endswith(".dtype") and found not in (None, _VERLS, value):
        problem, remedy = "it contradicts the preset of precision, which says it too", "Leave one of the two out."
        raise ConfigurationError(problem, setting=setting, value=found, allowed=str(value), remedy=remedy)
    if found is None or "override_optimizer_config" not in setting:
        OmegaConf.update(node, setting, value, force_add=True)


def _flat(block: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        name = f"{path}{key}"
        if isinstance(value, dict) and key != "mixed_precision":
            yield from _flat({each: inner for each, inner in value.items() if each != "_target_"}, f"{name}.")
        else:
            yield name, value
