"""Keys of a command that verl does not have, or that nothing reads: renamed, gone, misspelt, or added.

`keys.yaml` beside this file has those of verl 0.4 to 0.9.0. Where a key is meant is looked up in the config that the
command composes, with its engine.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError, sentence
from verl_precision.base.files import table_of
from verl_precision.check.rules.rule import Fault, Severity, fault_of_error
from verl_precision.presets import preset_groups, preset_names

# Blocks whose content verl hands to somebody else, vLLM, Ray, transformers or a user's class: any key may be read.
HANDED_ON = re.compile(r"(^|\.)(\w*kwargs|override_\w+|custom|ray_init|runtime_env|env_vars|\w+_options|hydra)\.")
_ENGINES = {"fsdp_config": "dp", "fsdp": "dp", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}
# Blocks that verl turns into its typed classes, which take no other name.
_TYPED = re.compile(r"(actor_rollout_ref\.(actor|ref|rollout|model)|critic)\.")


def keys_of(node: object, path: str = "") -> Iterator[str]:
    """Yield each key of a config, blocks too."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{path}{key}"
            yield from keys_of(value, f"{path}{key}.")


def unknown(key: str, value: str, every: Iterable[str], prefix: str = "") -> ConfigurationError:
    """Return what to say of a key that verl does not have, given the keys that there are.

    `prefix` is what the command writes before it; no key is to be added where nothing would read it.
    """
    known = set(every)
    problem, allowed = "verl has no such setting", ""
    section, row, rest = row_of(key)
    new = f"{row}{rest}"
    if section == "moved" and not _is_there(new, known) and row_of(new)[0] != "moved":
        error = unknown(new, value, known, prefix)  # moved, and gone since, or of another engine
        error.setting = key
        return error
    if section in ("moved", "unread") and _is_there(new, known):
        problem, allowed = "verl has moved this setting", new
        remedy = f"Write {'' if new in known else '+'}{new}={value}."
        if value == "null":  # it was the default, which is not null everywhere today
            remedy = "Drop it."
    elif section == "gone":
        problem, remedy = f"verl has no such setting any more: {row}", "Drop it."
    elif section == "replaced":
        remedy = row if row.endswith(".") else f"{row}."
    elif (engine := _other_engine(key, known)) is not None:
        problem = f"it is a setting of model_engine={engine}, and another engine is chosen"
        remedy = f"Drop it, or choose model_engine={engine}."
    elif HANDED_ON.search(key) and prefix != "~":
        remedy = f"Write +{key}={value}."
    else:
        remedy = meant(key, [*preset_groups(), *known])
    return ConfigurationError(problem, setting=key, value=value, allowed=allowed, remedy=remedy)


def meant(word: str, known: Iterable[str]) -> str:
    """Return the question for a word that was mistyped: the same word elsewhere, or one that is spelt alike."""
    every = [each for each in known if not each.endswith("_target_")]
    parent, _, name = word.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in every if each.rpartition(".")[0] == parent}
    near = [beside[each] for each in get_close_matches(name, beside, n=1, cutoff=0.75)]
    longer = sorted((each for each in every if each.endswith(f".{word}")), key=lambda each: (each[:5] != "actor", each))
    top = [each for each in every if each.endswith(f".{name}") and each.partition(".")[0] == word.partition(".")[0]]
    alike = near or longer[:2] or _spelt_alike(word, every) or (top[:2] if parent and len(name) > 4 else [])
    return f"Did you mean {' or '.join(alike)}?" if alike else "Check the spelling, or drop it."


def _spelt_alike(word: str, every: list[str]) -> list[str]:
    name = word.rpartition(".")[2]
    pool = [each for each in every if each.count(".") == word.count(".") and abs(len(each) - len(word)) < 4]
    close = get_close_matches(word, pool, n=3, cutoff=0.9)
    return [each for each in close if SequenceMatcher(None, name, each.rpartition(".")[2]).ratio() >= 0.75][:1]


def added(config: DictConfig, overrides: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each key behind a + that verl's classes refuse, or that nothing of verl's reads."""
    every = set(keys_of(OmegaConf.to_container(config, resolve=False)))
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if not word.startswith("+") or key in preset_groups() or "@" in key:
            continue
        if (fault := _group_meant(key, value)) is not None:
            yield fault
        elif section := _is_old(config, key):
            kind: Severity = "warning" if section == "gone" else "error"
            yield fault_of_error(unknown(key, value, every - {key}), "unknown-key", kind)
        elif HANDED_ON.search(f"{key}."):
            continue
        elif (refused := _refused_name(config, key)) is not None:
            block, name, fields = refused
            known = every - {f"{block}.{name}"} | {f"{block}.{field}" for field in fields}
            problem, remedy = (
                f"verl's class of {block} takes no {name}",
                unknown(f"{block}.{name}", value, known).remedy,
            )
            problem = f"{problem}, and the run ends there"
            yield Fault(key, problem, "", remedy, value=value, severity="error", name="unknown-key")
        elif strange := [part for part in key.split(".") if not name_is_read(part)]:
            problem = f"nothing in verl reads a setting called {strange[0]}"
            remedy = "Drop it, unless code of your own reads it."
            yield Fault(key, problem, "", remedy, value=value, severity="warning", name="key-unread")


def _group_meant(key: str, value: str) -> Fault | None:
    """Return the fault of a group of presets that was mistyped: Hydra adds it as a setting."""
    group = next(iter(get_close_matches(key, preset_groups(), n=1, cutoff=0.8)), "")
    if not group or "." in key:
        return None
    problem, names = "there is no such group of presets, and nothing reads the setting", preset_names(group)
    allowed, remedy = ", ".join(names), f"Did you mean +{group}={value}?"
    return Fault(key, problem, allowed, remedy, value=value, severity="error", name="unknown-key")


def unread_word(config: DictConfig, word: str) -> ConfigurationError | None:
    """Return what to say of an override of a setting that only `fully_async_main` carries over, if it is one."""
    key, _, value = word.partition("=")
    section, row, rest = row_of(key)
    if section != "unread" or value in ("null", "") or "async_training" in config:
        return None
    problem = "verl has kept the setting, and this main reads another: the value has no effect"
    remedy = f"Write {row}{rest}={value}."
    return ConfigurationError(problem, setting=key, value=value, allowed=f"{row}{rest}", remedy=remedy)


def legacy(config: DictConfig) -> Iterator[Fault]:
    """Yield a fault for each setting that has a value where only `fully_async_main` carries it over."""
    for block in {old.partition(".")[0]: None for old in table_of_keys()["unread"]}:
        node: Any = OmegaConf.to_container(config.get(block) or OmegaConf.create(), resolve=False)
        for key in keys_of(node, f"{block}."):
            value = OmegaConf.select(config, key)
            if value is not None and not isinstance(value, DictConfig):
                if (error := unread_word(config, f"{key}={value}")) is not None:
                    yield fault_of_error(error)


def _is_old(config: DictConfig, key: str) -> str:
    """Return the section of the table that has the key of a block that this main does not read, or nothing."""
    read = {"async_training", *(old.partition(".")[0] for old in table_of_keys()["unread"])}
    read = read if OmegaConf.select(config, "async_training.partial_rollout") is not None else set()
    return "" if key.partition(".")[0] in read else row_of(key)[0]


def _refused_name(config: DictConfig, key: str) -> tuple[str, str, list[str]] | None:
    """Return a typed block of verl's, the name in it that its class does not take, and those that it takes."""
    from verl_precision.check.verl_refusals import fields_of  # not above: its imports are many, and texts need none

    parts = key.split(".") if _TYPED.match(key) else []
    for end in range(1, len(parts)):
        block = ".".join(parts[:end])
        node: Any = OmegaConf.select(config, block)
        fields = fields_of(node.get("_target_")) if isinstance(node, DictConfig) else {}
        if fields and parts[end] not in fields:
            return block, parts[end], list(fields)
    return None


def name_is_read(name: str) -> bool:
    """Return whether a source of verl's or of this package has an attribute, a text or a field of this name."""
    word = re.escape(name)
    read = re.compile(rf"""\.{word}\b(?!\()|["'](?:[\w.]+\.)?{word}["']|^\s+{word}\s*:""", re.M)
    return any(name in text and read.search(text) for text in _sources())


@functools.cache
def _sources() -> tuple[str, ...]:
    packages = (find_spec(name) for name in ("verl", "verl_precision"))
    folders = (Path(folder) for each in packages if each for folder in each.submodule_search_locations or ())
    files = (path for folder in folders for path in folder.rglob("*.py"))
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in files)


def row_of(key: str) -> tuple[str, str, str]:
    """Return section, content and the rest below it of the longest key of the table that a key is at or below."""
    best: tuple[int, str, str, str] = (0, "", "", "")
    for section, rows in table_of_keys().items():
        for old, content in rows.items():
            pattern = r"(.+\.)?" + re.escape(old[2:]) if old.startswith("*.") else re.escape(old)
            if (found := re.match(rf"{pattern}(?=\.|$)", key)) and len(old) > best[0]:
                best = len(old), section, content, key[found.end() :]
    return best[1:]


@functools.cache
def table_of_keys() -> dict[str, dict[str, str]]:
    """Return the table: section, key of then, today's key or words."""
    return table_of(__file__)


def _other_engine(key: str, known: set[str]) -> str | None:
    """Return the engine that a key belongs to, where none of its blocks is there."""
    engine = next((_ENGINES[part] for part in key.split(".")[:-1] if part in _ENGINES), None)
    blocks = {part for part, name in _ENGINES.items() if name == engine}
    return None if engine is None or any(blocks & set(each.split(".")) for each in known) else engine


def _is_there(key: str, known: set[str]) -> bool:
    return key in known or bool(HANDED_ON.search(f"{key}."))


def merged(faults: list[Fault], of_words: Iterable[Fault]) -> list[Fault]:
    """Return the faults of the rules and of a command's words, errors first, one for one cause."""
    named = {each.setting for each in faults}
    own = [replace(each, problem=sentence(each.problem)) for each in of_words]
    own = [each for each in own if each.name != "key-unread" or each.setting not in named]
    wrong = [each.setting for each in own if each.severity == "error"]
    names = {name for key in wrong for name in key.split(".")}
    rest = [
        fault for fault in faults
        if not any(f"unexpected keyword argument '{name}'" in fault.problem for name in names)
        and not (fault.name == "setting-ignored" and any(f"{key}.".startswith(f"{fault.setting}.") for key in wrong))
    ]  # fmt: skip
    return sorted([*rest, *own], key=lambda fault: fault.rank)
