"""Facts about a model without loading it: from its `config.json`, from a replacement file, or by its name.

Also the models that verl serves beside the policy, with their dtypes: a distillation's teachers, a reward model. The
teacher in verl's YAML takes the rollout's dtype. A teacher by another name has its typed config's default, BF16.

Nothing is downloaded. A model of the hub is read from the cache. For the models that public scripts name most,
rules/known_models.yaml has the facts that rules need.
"""

import functools
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ROLLOUT, teaches
from verl_precision.check import rules

LARGEST = 16 << 20  # bytes of a config.json; real ones have some thousands
COUNTS = (  # rules compute with these
    "num_hidden_layers hidden_size vocab_size num_attention_heads num_key_value_heads head_dim intermediate_size "
    "num_experts num_local_experts moe_intermediate_size num_experts_per_tok max_position_embeddings"
).split()
# Ends of a name that do not change the shape: the kind of training after the base model, a date, a file format.
VARIANT = re.compile(
    r"[-_](base|instruct|chat|it|hf|thinking|0324|2507|1m|bf16|fp16|fp8|awq|gptq|int[48]|[48]bit|bnb|unsloth)$"
)
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a folder of the hub's cache


@dataclass(frozen=True)
class Described:
    """The known facts about a model."""

    content: Mapping[str, Any] = field(default_factory=dict)  # of its config.json; empty where nothing is known
    taken_from: str = ""  # the known model whose facts are used; empty: the facts are the model's own


def described(name: str, setting: str) -> Described:
    """Return the known facts about a model that a setting names by its path or name."""
    folder = os.path.expanduser(name)
    if os.access(os.path.join(folder, "config.json"), os.R_OK):
        return Described(read_config(Path(folder), setting))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a hub name either; a rule reports it
        cached = None
    return Described(read_config(Path(cached), setting)) if isinstance(cached, str) else by_name(name)


def model_config(config: DictConfig, owner: str = "actor_rollout_ref") -> Mapping[str, Any]:
    """Return the known content of a model's `config.json`."""
    return described(str(config[owner].model.path), f"{owner}.model.path").content


def is_folder(name: object) -> bool:
    """Return whether a path is a folder on this machine; pathlib would raise for a path that is too long."""
    return os.path.isdir(os.path.expanduser(str(name)))


def read_config(path: Path, setting: str) -> dict[str, Any]:
    """Return the content of a `config.json`, given its path or folder, with the keys of `text_config` at the top."""
    try:
        file = path / "config.json" if path.is_dir() else path
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > LARGEST:
            raise ValueError(f"it has {found.st_size:,} bytes, but a config.json has some thousands")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("its JSON is not an object")
        content = {**(content.get("text_config") or {}), **content}
        for key in COUNTS:
            if (count := content.get(key)) is not None and not (type(count) is int and count > 0):
                raise ValueError(f"{key} is {count!r}, not a whole number above 0")
        if not isinstance(content.get("model_type", ""), str):
            raise ValueError(f"model_type is {content['model_type']!r}, not a word")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or f"{error}".partition("\n")[0][:200]
        raise ConfigurationError(
            f"this is not a model's config.json: {why}", setting=setting, value=str(path)[:200],
            allowed="a config.json as the hub has it, or a folder with one", remedy="Correct the path or the file.",
        ) from error  # fmt: skip
    return content


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the facts of known_models.yaml by the models' names on the hub, with the keys of `config.json`."""
    table = table_of(rules.__file__, "known_models.yaml")
    found = {}
    for name, row in table["models"].items():
        *values, more = row if isinstance(row[-1], dict) else (*row, {})
        facts = dict(zip(table["fields"], values, strict=True))
        found[name] = {key: value for key, value in facts.items() if value is not None} | more
    return found


def by_name(name: str) -> Described:
    """Return the known facts about a model by its name: a name of the hub, or the last part of a path.

    The full name of a known model, in upper or lower case, gives all its facts. Otherwise the last part of the name,
    without ends that keep the shape (`VARIANT`), gives all facts but the length of the context.
    """
    own = {known.lower(): known for known in known_models()}
    if hub := CACHED.search(name):
        name = "/".join(hub.groups())
    if known := own.get(name.lower()):
        return Described(known_models()[known])
    lasts = {known.rpartition("/")[2]: own[known] for known in own}
    last = name.rstrip("/").rpartition("/")[2].lower()
    stems = {_stem(each): known for each, known in reversed(lasts.items())}
    if (known := lasts.get(last) or stems.get(_stem(last))) is None:
        return Described()
    shape = {key: value for key, value in known_models()[known].items() if key != "max_position_embeddings"}
    return Described(shape, known)


def _stem(name: str) -> str:
    while (shorter := VARIANT.sub("", name)) != name:
        name = shorter
    return name.removeprefix("meta-")  # of Meta-Llama-3.1


@dataclass(frozen=True)
class Served:
    """A model beside the policy that inference engines of its own serve: a teacher, or a reward model."""

    role: str
    setting: str  # path of its inference's config node
    named: str  # setting that names the model
    path: str | None  # its value
    engine: str
    dtype: str
    source: str  # where the dtype comes from


def served_models(config: DictConfig) -> list[Served]:
    """Return the models that verl will serve beside the policy."""
    found = []
    if teaches(config):
        teachers = dict(config.distillation.get("teacher_models") or {})
        if len(teachers) > 1:  # verl drops its own entry then
            teachers.pop("teacher_model", None)
        place = "distillation.teacher_models"
        for name in teachers:
            role = "teacher" if len(teachers) == 1 else f"teacher {name}"
            found.append(_served(config, role, f"{place}.{name}", "inference"))
    if OmegaConf.select(config, "reward.reward_model.enable"):
        found.append(_served(config, "reward model", "reward.reward_model", "rollout"))
    return found


def _served(config: DictConfig, role: str, owner: str, block: str) -> Served:
    setting = f"{owner}.{block}"
    node, name = OmegaConf.select(config, setting) or DictConfig({}), OmegaConf.select(config, f"{setting}.name")
    place, kwargs = f"{setting}.dtype", (node.get("engine_kwargs") or {}).get(name) or {}
    source = place if "dtype" in node else f"{place} (not set: BF16, whatever the policy's rollout has)"
    if "dtype" in node and OmegaConf.is_interpolation(node, "dtype"):
        source = f"{place} (as {ROLLOUT}.dtype)"
    if "dtype" in kwargs:
        source = f"{setting}.engine_kwargs.{name}.dtype"
    dtype = short(kwargs.get("dtype") or node.get("dtype") or "bf16")
    named = f"{owner}.model_path"
    return Served(role, setting, named, OmegaConf.select(config, named), str(name), dtype, source)
