"""Calls verl's own validators, typed configs and registries on a composed config.

verl calls them too: some before Ray starts, most in a worker, minutes later. Here each is called by itself, so that an
error names the wrong setting. Nothing is started.
"""

import contextlib
import dataclasses
import functools
import io
import pkgutil
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, content_of, engines, leaves, lora_rank, teaches, uses_adapter
from verl_precision.check.rules.tables import NUMBERS_OR_NULL, names_in, null_number
from verl_precision.integration.ledger import lost_symbols

LARGEST_RANK = 512  # of vLLM's `MaxLoRARanks`


def refusals(config: DictConfig) -> tuple[ConfigurationError, ...]:
    """Return the errors with which verl refuses a composed config, at most one for each setting."""
    # verl prints its messages in the run
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        named = [] if lost_symbols("check of names") else list(_names(config))
        return (*named, *(_typed(config) if not named else ()))


def _names(config: DictConfig) -> Iterator[ConfigurationError]:
    """Look up names in verl's registries; yield an error for each unknown name."""
    from verl.trainer.ppo import core_algos
    from verl.utils.torch_dtypes import PrecisionType
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    questions: list[tuple[str, Callable]] = [("algorithm.adv_estimator", core_algos.get_adv_estimator_fn)]
    if config.actor_rollout_ref.model.get("external_lib") is None:  # otherwise external_lib may register more
        questions.append(("actor_rollout_ref.actor.policy_loss.loss_mode", core_algos.get_policy_loss_fn))
    for engine in engines(config):
        mixed = (engine.node.get("mixed_precision") or {}) if engine.strategy in FSDP else {}
        places = [f"mixed_precision.{key}" for key in mixed if str(key).endswith("_dtype")]
        if engine.strategy in FSDP and engine.node.get("model_dtype") is not None:
            places.append("model_dtype")
        questions += [(f"{engine.setting}.{place}", PrecisionType.to_dtype) for place in places]
    for setting, look_up in questions:
        value = OmegaConf.select(config, setting)
        try:
            look_up(value)
        except (ValueError, RuntimeError, KeyError) as error:
            known = [each.value for each in core_algos.AdvantageEstimator if look_up is core_algos.get_adv_estimator_fn]
            yield _refused(error, setting, value, known)
    rollout, known = config.actor_rollout_ref.rollout.name, sorted({name for name, _ in _ROLLOUT_REGISTRY})
    if rollout not in known:
        yield _refused("verl's worker does not support this rollout", "actor_rollout_ref.rollout.name", rollout, known)
    for name in names_in(config, "trainer.logger"):
        if name not in (*Tracking.supported_backend, "tracking"):
            problem = f"{name} is not supported; verl reports this only after loading everything"
            yield _refused(problem, "trainer.logger", config.trainer.logger, Tracking.supported_backend)


def mistyped(config: DictConfig) -> list[ConfigurationError]:
    """Return errors for values that are no number, switch or block where verl has one; or for a null number.

    verl builds its typed configs without checking types, and fails later, when it computes with a value.
    """
    problem, remedy = "verl expects {} here and fails when it reads this value", "Correct it, or leave it out."
    misfits = [
        ConfigurationError(problem.format(kind), setting=f"{path}.{key}", value=value, allowed=kind, remedy=remedy)
        for path, node, kinds in _blocks(config)
        for key, value in node.items()
        if (kind := _kind_instead(f"{path}.{key}", value, kinds.get(key))) is not None
    ]
    if misfits or (setting := null_number(config)) is None:
        return misfits
    said = {"allowed": "a value", "remedy": f"Set {setting}."}
    return [ConfigurationError("verl needs a number here and computes with it", setting=setting, **said)]


def misspelt(config: DictConfig) -> Iterator[ConfigurationError]:
    """Yield an error for each setting that verl does not have, if one of verl's settings is spelt almost alike."""
    for path, node, kinds in _blocks(config):
        for key in (str(each) for each in node if kinds and each not in kinds):
            alike = [each for each in map(str, kinds) if each[0] == key[0] and abs(len(each) - len(key)) < 3]  # a typo
            if near := get_close_matches(key, alike, n=1, cutoff=0.8):
                problem, remedy = "verl has no such setting", f"Did you mean {path}.{near[0]}?"
                yield ConfigurationError(problem, setting=f"{path}.{key}", allowed="verl's settings", remedy=remedy)


def _blocks(config: DictConfig) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield setting, content, and types by name of each block; no types if verl does not describe the block."""
    content, known = content_of(config, resolve=False), _values_of_verl()
    parts = ("actor_rollout_ref", "critic", "algorithm", "data", "trainer", "distillation", "reward")
    waiting = [(part, content.get(part), known.get(part)) for part in parts]
    for path, node, own in waiting:  # the list grows in the loop
        own = own if isinstance(own, dict) else {}
        if isinstance(node, dict):
            yield path, node, {name: type(value) for name, value in own.items()} | fields_of(node.get("_target_"))
            waiting += [(f"{path}.{key}", value, own.get(key)) for key, value in node.items()]


@functools.cache
def _values_of_verl() -> Any:
    """Return verl's own values where its YAML states them and its typed configs do not; read once."""
    from verl.trainer import config as of_verl

    folder = Path(of_verl.__file__).parent
    known: Any = OmegaConf.to_container(OmegaConf.load(folder / "ppo_trainer.yaml"), resolve=False)
    known["data"] = OmegaConf.to_container(OmegaConf.load(folder / "data" / "legacy_data.yaml"), resolve=False)
    return known


def _kind_instead(setting: str, value: object, hint: object) -> str | None:
    """Return the kind of value that a setting needs; None if the value fits, or is null or an interpolation."""
    hint = float if setting in NUMBERS_OR_NULL else hint
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds: set[Any] = {get_origin(each) or each for each in hints} - {None, type(None)}
    if value == "" and kinds == {bool}:  # an unset variable of a script: verl takes it for False
        return None
    if not kinds or value is None or isinstance(value, str) and ("${" in value or value == "???"):
        return None
    if kinds <= {int, float, bool}:
        whole = float not in kinds and int in kinds and not setting.endswith(".num_warmup_batches")  # may be 1.5
        kind = "a whole number" if isinstance(value, float) else "a number or a switch"
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return kind
        return kind if whole and not number.is_integer() else None
    is_block = all(each is dict or dataclasses.is_dataclass(each) for each in kinds)
    return "a block of settings" if is_block and not isinstance(value, dict) else None


def fields_of(target: object) -> dict[str, Any]:
    """Return the types of a typed config's fields; empty for a class that cannot be found."""
    try:
        cls = pkgutil.resolve_name(str(target)) if target else None
    except (ImportError, AttributeError, ValueError):  # verl fails with it too, and `_typed` reports it
        return {}
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__pydantic_fields__"):  # ours check types themselves
        return {}
    return {field.name: field.type for field in dataclasses.fields(cls)}


def is_refused(config: DictConfig, setting: str) -> bool:
    """Return whether a setting stands in a block of actor or rollout whose typed config has no such field."""
    path, _, name = setting.rpartition(".")
    typed = re.match(r"actor_rollout_ref\.(actor|rollout)\.", setting)
    fields = fields_of(OmegaConf.select(config, f"{path}._target_")) if typed else {}
    return bool(fields) and name not in (*fields, "_target_")


def _typed(config: DictConfig) -> Iterator[ConfigurationError]:
    """Build verl's typed configs, and let verl validate the whole config."""
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    if rank := lora_rank(config):  # to judge the rank verl imports vLLM, which takes long
        if rank > LARGEST_RANK and uses_adapter(config) and config.actor_rollout_ref.rollout.name == "vllm":
            problem, setting = "vLLM has no LoRA adapter of this rank", "actor_rollout_ref.model.lora_rank"
            allowed, remedy = f"at most {LARGEST_RANK}", "Choose a smaller rank, or set model.lora.merge=True."
            yield ConfigurationError(problem, setting=setting, value=rank, allowed=allowed, remedy=remedy)
        config = deepcopy(config)
        with open_dict(config):
            config.actor_rollout_ref.model.lora_rank, config.actor_rollout_ref.model.lora = 0, {}

    # without verl's need_critic and need_reference_policy, which import data sets
    roles = [engine.role for engine in engines(config)]

    def critic() -> None:
        block, gpus = deepcopy(config.critic), config.trainer.nnodes * config.trainer.n_gpus_per_node
        with open_dict(block):
            block.model = None  # its files may not be here
        omega_conf_to_dataclass(block).validate(gpus, config.data.train_batch_size)

    def built(block: str) -> tuple[str, Callable[[], object]]:
        return block, lambda: omega_conf_to_dataclass(OmegaConf.select(config, block))

    steps: list[tuple[str, Callable[[], object]]] = [
        *map(built, ("actor_rollout_ref.actor", "actor_rollout_ref.rollout")),
        ("", lambda: validate_config(config, "ref" in roles, use_critic=False)),
    ]
    if teaches(config):
        steps.append(built("distillation"))
    if OmegaConf.select(config, "reward.reward_model.enable"):
        steps.append(built("reward.reward_model.rollout"))
    if "critic" in roles:
        steps.append(("critic", critic))
    for block, step in steps:
        try:
            step()
        except Exception as error:  # any error of a class of verl is a refusal; Hydra wraps it
            cause = error.__cause__ or error
            if isinstance(cause, ConfigurationError):  # a class of this package, whose bounds a rule checks too
                continue
            setting, value = _at_fault(config, block, error)
            yield _refused(cause, setting, value)
            return


def _at_fault(config: DictConfig, block: str, error: BaseException) -> tuple[str, object]:
    """Return the setting that verl's message, or its assertion, names by path, key or value; otherwise the block."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    text = str(cause) or (frames[-1].line or "" if frames else "")
    said = set(re.findall(r"[A-Za-z_][\w-]*", text))
    given = {word.lstrip("+").partition("=")[0] for word in OmegaConf.select(config, "hydra.overrides.task") or ()}
    inner = re.search(r"^full_key: ([\w.]+)", str(error), re.M)  # the block that Hydra was building
    block = inner[1] if inner and OmegaConf.is_dict(OmegaConf.select(config, inner[1])) else block
    found = []
    for root in [block] if block else ["data", "actor_rollout_ref", "algorithm"]:
        for path, value in leaves(content_of(OmegaConf.select(config, root)), root):
            for word in (path.rpartition(".")[2], value):
                if isinstance(word, str) and word in said:
                    found.append((path not in text, path not in given, -len(word), path.count("."), path, value))
                    break
    *_, path, value = min(found, key=lambda entry: entry[:5], default=(block or "actor_rollout_ref", "(the block)"))
    return path, value


def _refused(said: str | BaseException, setting: str, value: object, known: Iterable[str] = ()) -> ConfigurationError:
    if isinstance(said, BaseException):  # an assertion without a message: its source line
        frames = traceback.extract_tb(said.__traceback__)
        said = str(said).partition("\n    full_key: ")[0] or (frames[-1].line if frames else "") or type(said).__name__
    allowed = ", ".join(known) or "the values that verl's message names"
    remedy = f"Set {setting}." if value is None else f"Correct {setting}, or leave it out."
    return ConfigurationError(f"verl refuses it: {said}", setting=setting, value=value, allowed=allowed, remedy=remedy)
