"""Words of a command that Hydra or verl refuses: unknown, renamed, removed, misspelt, already present.

The key that was meant is searched in the config that the command composes, with its engine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError
from verl_precision.check.keys import keys_of, row_of, unread_word
from verl_precision.check.rules.rule import Fault, Severity, fault_of_error
from verl_precision.check.verl_refusals import is_refused
from verl_precision.check.who_decides import decisions, is_option
from verl_precision.presets import preset_groups, preset_names

# Blocks whose content verl passes on to vLLM, Ray, transformers or a user's class, which may read any key.
HANDED_ON = re.compile(r"(^|\.)(\w*kwargs|override_\w+|custom|ray_init|runtime_env|env_vars|\w+_options|hydra)\.")
_TO_DROP = "Drop it."


def wrong_words(
    composed: Callable[[Sequence[str]], DictConfig], path: Path, overrides: Sequence[str]
) -> tuple[list[ConfigurationError], DictConfig]:
    """Return an error for each word that Hydra refuses, and the config of the other words.

    The list is empty if Hydra cannot read a word, or cannot compose the config groups: that is one error by itself.
    """
    try:
        words = OverridesParser.create().parse_overrides(list(overrides))
        there, ours = OmegaConf.to_container(composed([]).hydra.runtime.choices), preset_groups()
        groups = [word for word in words if word.key_or_group in {*there, *ours} and not isinstance(word.value(), dict)]
        twice = [word for word in groups if word.is_add() and word.key_or_group in there]
        config = composed([word.input_line for word in groups if word not in twice])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
        return [], OmegaConf.create()
    known = set(keys_of(OmegaConf.to_container(config, resolve=False)))
    told = decisions(config).origins.items()
    origins = {key: each for key, each in told if each.group not in ("", "scale") and not is_option(key, each)}
    errors: dict[str, ConfigurationError] = {}
    for word in words:
        if word in groups and word not in twice:  # it is in the config already, and names no key
            continue
        key, value, given = word.key_or_group, word.value(), word.input_line.partition("=")[2] or "VALUE"
        has_value = word.is_add() and key in known and OmegaConf.select(config, key) is not None
        if word in twice or (has_value and key not in origins and not isinstance(value, dict | list)):
            problem, remedy = f"{path} has it already; + adds new keys", f"Write {word.input_line[1:]}, without the +."
            errors[key] = ConfigurationError(problem, setting=key, value=given, remedy=remedy)
        elif has_value and key in origins:
            preset, said = origins[key].who, origins[key].value  # presets=win does not help either
            problem = f"{preset} has it already, as {said}, and + adds only what is not there"
            remedy = f"Leave out {word.input_line}, or {preset} if that is not what you want."
            errors[key] = ConfigurationError(problem, setting=key, value=given, allowed=str(said), remedy=remedy)
        elif word.is_add() or word.is_force_add() or key in known:
            known |= {key, *(key[:end] for end, letter in enumerate(key) if letter == "."), *keys_of(value, f"{key}.")}
        elif key not in errors:
            errors[key] = unknown(key, given, known, deleted=word.is_delete())
    found = list(errors.values())
    if found:
        found += filter(None, (unread_word(config, *word.partition("=")[::2]) for word in overrides))
    return found, config


def unknown(key: str, value: str, every: Iterable[str], deleted: bool = False) -> ConfigurationError:
    """Return the error for a key that verl does not have, given the existing keys.

    The remedy adds no key that nothing would read, and no key in a command that deletes it.
    """
    known = set(every)
    problem, allowed = "verl has no such setting", ""
    section, row, rest = row_of(key)
    new = f"{row}{rest}"
    is_there = new in known or bool(HANDED_ON.search(f"{new}."))
    if section == "moved" and not is_there and row_of(new)[0] != "moved":  # gone since, or of another engine
        error = unknown(new, value, known, deleted)
        error.setting = key
        return error
    if section in ("moved", "unread") and is_there:
        problem, allowed = "verl has moved this setting", new
        remedy = f"Write {'' if new in known else '+'}{new}={value}."
        if value == "null":  # null was the default; today some defaults are not null
            remedy = _TO_DROP
    elif section == "gone":
        problem, remedy = f"verl has removed this setting: {row}", _TO_DROP
    elif section == "replaced":
        remedy = row if row.endswith(".") else f"{row}."
    elif HANDED_ON.search(key) and not deleted:
        remedy = f"Write +{key}={value}."
    else:
        remedy = meant(key, [*preset_groups(), *known])
    return ConfigurationError(problem, setting=key, value=value, allowed=allowed, remedy=remedy)


def meant(word: str, known: Iterable[str]) -> str:
    """Return a "Did you mean" question for a mistyped word: a similar name, or the same name elsewhere."""
    every = [each for each in known if not each.endswith("_target_")]
    parent, _, name = word.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in every if each.rpartition(".")[0] == parent}
    alike = [beside[each] for each in get_close_matches(name, beside, n=1, cutoff=0.75)]
    alike = alike or [each for each in every if each.endswith(f".{word}")]
    if not alike and parent:  # the block is mistyped, or is the wrong one
        top = parent.partition(".")[0]
        same = [each for each in every if each.endswith(f".{name}")]
        alike = get_close_matches(word, same, n=1, cutoff=0.9)
        alike = alike or [each for each in same if each.startswith(f"{top}.") and len(name) > 4]
    alike = sorted(alike, key=lambda each: (not each.startswith("actor"), each))[:2]
    return f"Did you mean {' or '.join(alike)}?" if alike else "Check the spelling, or drop it."


def added(config: DictConfig, overrides: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault for each key after a + that verl had once, or that is a misspelt group of presets."""
    every = set(keys_of(OmegaConf.to_container(config, resolve=False)))
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if not word.startswith("+") or key in preset_groups() or "@" in key:
            continue
        severity: Severity = "error"
        group = "" if "." in key else next(iter(get_close_matches(key, preset_groups(), n=1, cutoff=0.8)), "")
        if group:  # Hydra would add it as a setting
            problem, allowed = "there is no preset group of this name", ", ".join(preset_names(group))
            error = ConfigurationError(problem, allowed=allowed, remedy=f"Did you mean +{group}={value}?")
        elif section := "" if "async_training" in config else row_of(key)[0]:  # that main reads old keys, too
            error, severity = unknown(key, value, every - {key}), "warning" if section == "gone" else "error"
        elif is_refused(config, key):
            error = unknown(key, value, every - {key})
        else:
            continue
        error.setting, error.value = key, value
        yield fault_of_error(error, "unknown-key", severity)
