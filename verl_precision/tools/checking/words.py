"""Words of a command that Hydra or verl does not take: unknown, renamed, gone, misspelt, there already, read by nobody.

Where a key is meant is looked up in the config that the command composes, with its engine.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError
from verl_precision.check.keys import keys_of, row_of, table_of_keys, unread_word
from verl_precision.check.rules.rule import Fault, Severity, fault_of_error
from verl_precision.check.who_decides import Origin, decisions
from verl_precision.check.winning_words import is_option, is_same
from verl_precision.presets import preset_groups, preset_names

# Blocks whose content verl hands to somebody else, vLLM, Ray, transformers or a user's class: any key may be read.
HANDED_ON = re.compile(r"(^|\.)(\w*kwargs|override_\w+|custom|ray_init|runtime_env|env_vars|\w+_options|hydra)\.")
_ENGINES = {"fsdp_config": "dp", "fsdp": "dp", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}
# Blocks that verl turns into its typed classes, which take no other name.
_TYPED = re.compile(r"(actor_rollout_ref\.(actor|ref|rollout|model)|critic)\.")


def wrong_words(
    composed: Callable[[Sequence[str]], DictConfig], path: Path, overrides: Sequence[str]
) -> tuple[list[ConfigurationError], DictConfig]:
    """Return an error for each word that keeps a command from being composed, and what the others compose.

    Nothing where Hydra cannot read a word, or what groups a config is made of: that is one error by itself.
    """
    try:
        words = OverridesParser.create().parse_overrides(list(overrides))
        there = OmegaConf.to_container(composed([]).hydra.runtime.choices)
        errors, groups = _wrong_groups([word for word in words if _is_group(word, there)], there, path)
        config = composed([word.input_line for word in groups])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
        return [], OmegaConf.create()
    known, added_again = set(keys_of(OmegaConf.to_container(config, resolve=False))), []
    origins = {key: each for key, each in decisions(config).origins.items() if _is_meant(key, each)}
    for word in (each for each in words if not _is_group(each, there)):
        key, value, adds = word.key_or_group, word.value(), word.is_add() or word.is_force_add()
        if word.is_sweep_override():
            problem, said = "Hydra takes a comma for several runs", word.input_line.partition("=")[2]
            remedy = f"A decimal has a point: {said.replace(',', '.')}. A list has brackets: {key}=[{said}]."
            errors.append(ConfigurationError(problem, setting=key, value=said, allowed="one value", remedy=remedy))
        elif word.is_add() and key in origins and OmegaConf.select(config, key) is not None:
            added_again.append(word)
        elif word.is_add() and key in known and not _is_open(config, key, value):
            errors.append(_there_already(word, path))
        elif adds or key in known:
            known |= {key, *(key[:end] for end, letter in enumerate(key) if letter == "."), *keys_of(value, f"{key}.")}
        else:
            given = word.input_line.partition("=")[2] or "VALUE"
            errors.append(unknown(key, given, known, "~" if word.is_delete() else ""))
    errors = [*_of_presets(added_again, origins), *errors]
    if errors:
        pairs = (word.partition("=")[::2] for word in overrides)
        errors += filter(None, (unread_word(config, key, value) for key, value in pairs))
    return errors, config


def _is_group(word: Override, there: Any) -> bool:
    return word.key_or_group in {*there, *preset_groups()} and not isinstance(word.value(), dict)


def _wrong_groups(words: Sequence[Override], there: Any, path: Path) -> tuple[list[ConfigurationError], list[Override]]:
    """Return what is wrong with words that choose a group, and those that can be composed."""
    errors, right = [], []
    for word in words:
        key = word.key_or_group
        if word.is_add() and key in there:
            errors.append(_there_already(word, path))
        elif key not in there and not word.is_add() and not word.is_force_add():
            problem, allowed = f"{path} has no such group in its defaults", ", ".join(preset_names(key))
            said = {"setting": key, "value": word.value(), "allowed": allowed}
            errors.append(ConfigurationError(problem, **said, remedy=f"Write +{key}={word.value()}."))
        else:
            right.append(word)
    return errors, right


def _there_already(word: Override, path: Path) -> ConfigurationError:
    written = word.input_line.removeprefix("+")
    key, _, value = written.partition("=")
    problem, remedy = f"{path} has it already, and + adds", f"Write {written}, without the +."
    return ConfigurationError(problem, setting=key, value=value, allowed="a change, without +", remedy=remedy)


def _is_open(config: DictConfig, key: str, value: object) -> bool:
    """Return whether Hydra lets + write to a key that is there: it is null, or a block or a list is merged."""
    return isinstance(value, dict | list) or OmegaConf.is_missing(config, key) or OmegaConf.select(config, key) is None


def _is_meant(setting: str, origin: Origin) -> bool:
    return origin.group not in ("", "scale") and not is_option(setting, origin)


def _of_presets(words: Sequence[Override], origins: dict[str, Origin]) -> Iterator[ConfigurationError]:
    """Yield the answer to words that add what a chosen preset has already: not even `presets=win` can help there."""
    if not words:
        return
    different = [
        each for each in words if not is_same(each.key_or_group, each.value(), origins[each.key_or_group].value)
    ]
    word = (different or words)[0]
    preset, wanted = origins[word.key_or_group].who, origins[word.key_or_group].value
    problem = f"{preset} has it already, as {wanted}, and + adds only what is not there"
    all_words = " ".join(each.input_line for each in words)
    remedy = f"Leave out {all_words}: presets say it. Or leave out {preset}, if that is not what you want."
    said = {"setting": word.key_or_group, "value": word.value(), "allowed": f"{wanted}, the preset's"}
    yield ConfigurationError(problem, **said, remedy=remedy)


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


def _other_engine(key: str, known: set[str]) -> str | None:
    """Return the engine that a key belongs to, where none of its blocks is there."""
    engine = next((_ENGINES[part] for part in key.split(".")[:-1] if part in _ENGINES), None)
    blocks = {part for part, name in _ENGINES.items() if name == engine}
    return None if engine is None or any(blocks & set(each.split(".")) for each in known) else engine


def _is_there(key: str, known: set[str]) -> bool:
    return key in known or bool(HANDED_ON.search(f"{key}."))


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
        group = next(iter(get_close_matches(key, preset_groups(), n=1, cutoff=0.8)), "")
        if group and "." not in key:  # Hydra adds it as a setting
            problem, names = "there is no such group of presets, and nothing reads the setting", preset_names(group)
            remedy = f"Did you mean +{group}={value}?"
            allowed = ", ".join(names)
            yield Fault(key, problem, allowed, remedy, value=value, severity="error", name="unknown-key")
        elif section := _is_old(config, key):
            kind: Severity = "warning" if section == "gone" else "error"
            yield fault_of_error(unknown(key, value, every - {key}), "unknown-key", kind)
        elif HANDED_ON.search(f"{key}."):
            continue
        elif (refused := _refused_name(config, key)) is not None:
            block, name, fields = refused
            known = every - {f"{block}.{name}"} | {f"{block}.{field}" for field in fields}
            problem = f"verl's class of {block} takes no {name}, and the run ends there"
            remedy = unknown(f"{block}.{name}", value, known).remedy
            yield Fault(key, problem, "", remedy, value=value, severity="error", name="unknown-key")
        elif strange := [part for part in key.split(".") if not name_is_read(part)]:
            problem = f"nothing in verl reads a setting called {strange[0]}"
            remedy = "Drop it, unless code of your own reads it."
            yield Fault(key, problem, "", remedy, value=value, severity="warning", name="key-unread")


def _is_old(config: DictConfig, key: str) -> str:
    """Return the section of the table that has the key of a block that this main does not read, or nothing."""
    read = {"async_training", *(old.partition(".")[0] for old in table_of_keys()["unread"])}
    read = read if OmegaConf.select(config, "async_training.partial_rollout") is not None else set()
    return "" if key.partition(".")[0] in read else row_of(key)[0]


def _refused_name(config: DictConfig, key: str) -> tuple[str, str, list[str]] | None:
    """Return a typed block of verl's, the name in it that its class does not take, and those that it takes."""
    from verl_precision.check.verl_refusals import fields_of  # imports verl

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
