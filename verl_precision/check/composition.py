"""Our words for what a user typed, and for a config that does not compose.

The parser of YAML, Hydra and OmegaConf say what they could not do; a user has to know which word to change.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.dtypes import short
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import ROLLOUT
from verl_precision.check.keys import meant, unknown
from verl_precision.presets import preset_groups, preset_names

_EXAMPLE = "e.g. recipes/quickstart/quickstart.yaml"


def require_overrides(words: Sequence[str]) -> None:
    """Refuse words that are no Hydra overrides, and two presets of one group, of which Hydra takes the last.

    Raises:
        ConfigurationError: For the first of them, with the word to write.
    """
    chosen: dict[str, str] = {}
    for index, word in enumerate(words):
        near = " ".join(words[max(index - 1, 0) : index + 3])
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            value = value or next((each for each in words[index + 1 : index + 2] if "=" not in each), "VALUE")
            written = f"{flag.lstrip('-')}={value}" if flag.lstrip("-") in preset_groups() else "settings as KEY=VALUE"
            problem, allowed = "there is no such option here", "the options of --help, and Hydra overrides"
            raise ConfigurationError(problem, setting=flag, value=value, allowed=allowed, remedy=f"Write {written}.")
        if not re.match(r"~|[^=]+=", word):
            joined = [each for each in re.sub(r"\s*=\s*", "=", near).split() if "=" in each and each not in words]
            problem = f"`{word}` is not an override" + (": `=` has no spaces around it" if joined else "")
            remedy = f"Write {joined[0]}." if joined else "Quote a value that has spaces."
            raise ConfigurationError(problem, allowed="KEY=VALUE, +KEY=VALUE or ~KEY", remedy=remedy)
        key, _, name = word.lstrip("+").partition("=")
        if key in preset_groups() and chosen.setdefault(key, name) != name:
            problem = f"{key}={chosen[key]} is given too, and Hydra takes the last without a word"
            remedy = f"Leave one out. Where a script gives one, write {key.upper()}={name} before its name."
            raise ConfigurationError(problem, setting=key, value=name, allowed="one preset", remedy=remedy)


def require_recipe(path: Path) -> None:
    """Refuse a recipe that is not there, or a folder in its place."""
    if path.is_dir():
        inside = sorted(str(each) for each in path.glob("*.yaml"))
        remedy = f"Give {inside[0]}." if inside else f"Give the YAML itself, {_EXAMPLE}."
        allowed = ", ".join(inside) or "a recipe's YAML"
        raise ConfigurationError(f"{path} is a folder, not a recipe", allowed=allowed, remedy=remedy)
    if not path.is_file():
        remedy = f"Give the YAML itself, {_EXAMPLE}, from the repository's root."
        raise ConfigurationError(f"{path}: there is no such recipe", remedy=remedy)


def read_recipe(path: Path) -> DictConfig:
    """Return the YAML of a recipe that is there; refuse by file and line what is none."""
    require_recipe(path)
    try:
        content = OmegaConf.load(path)
    # OSError: a number in place of keys, or no rights
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise in_our_words(error, path) from error
    if not isinstance(content, DictConfig):
        raise ConfigurationError(f"{path} is not a recipe: its YAML has no keys")
    return content


def require_complete(config: DictConfig) -> None:
    """Refuse a config without verl's parts, or without the name of the rollout, which verl leaves to its users."""
    parts = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer")
    if absent := [part for part in parts if part not in config]:
        problem, remedy = f"it has no {', '.join(absent)}", "Begin it with `defaults: [ppo_trainer, _self_]`."
        raise ConfigurationError(f"this is no config of verl's main_ppo: {problem}", remedy=remedy)
    for block in (*parts, *map("actor_rollout_ref.{}".format, ("actor", "actor.optim", "model", "ref", "rollout"))):
        if not isinstance(value := OmegaConf.select(config, block), DictConfig):
            problem, remedy = "verl has a block of settings there", f"Correct the indent of the lines below {block}."
            raise ConfigurationError(problem, setting=block, value=value, allowed="a block", remedy=remedy)
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        problem, remedy = "verl leaves it open, and nothing chooses one", f"Set {ROLLOUT}.name=vllm."
        raise ConfigurationError(problem, setting=f"{ROLLOUT}.name", value="???", allowed="vllm", remedy=remedy)


def in_our_words(
    error: Exception, path: Path | str, overrides: Sequence[str] = (), keys: Callable[[], Iterable[str]] = tuple
) -> ConfigurationError:
    """Return what was wrong with a user's words, from the error of YAML's parser, Hydra or OmegaConf that it led to.

    `keys` is called for the settings that the config of the recipe has, to find the one that was meant.
    """
    said = " ".join(re.split(r"\w*\s*search path:", str(error), flags=re.I)[0].split())
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        file = path if mark is None or not Path(mark.name).is_file() else mark.name
        place = f"{file}, line {mark.line + 1}" if mark else str(file)
        why = getattr(error, "problem", None) or said
        remedy = "Correct that line, or the one above: most often an indent, a bracket or a quote."
        return ConfigurationError(f"{place}: this is not YAML: {why}", remedy=remedy)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        allowed = ", ".join(preset_names(group) if group in preset_groups() else error.options)
        problem, remedy = "there is no such preset", meant(short(name), error.options)
        return ConfigurationError(problem, setting=group, value=name, allowed=allowed, remedy=remedy)
    if isinstance(error, OverrideParseException):
        problem, remedy = f"Hydra cannot read `{error.override}`", "Put quotes into the value: KEY=\"'VALUE'\"."
        return ConfigurationError(problem, allowed="KEY=VALUE, +KEY=VALUE or ~KEY", remedy=remedy)
    if found := re.search(r"Multiple values for ([\w/@.]+)\. |([\w/@.]+) appears more than|already at '(.+?)'", said):
        key = next(filter(None, found.groups())).partition("@")[0]
        added = (each[1:].partition("=")[0] for each in overrides if each.startswith("+"))
        key = next((each for each in added if key.startswith(f"{each}/")), key)  # Hydra names a part of the group
        value = _value_of(key, overrides)
        problem, remedy = f"{path} has it already, and + adds", f"Write {key}={value}, without the +."
        return ConfigurationError(problem, setting=key, value=value, allowed="a change, without +", remedy=remedy)
    if found := re.search(r"Ambiguous value for argument '(.+?)=(\S+)'", said):
        (key, value), problem = found.groups(), "Hydra takes a comma for several runs"
        remedy = f"A decimal has a point: {value.replace(',', '.')}. A list has brackets: {key}=[{value}]."
        return ConfigurationError(problem, setting=key, value=value, allowed="one value", remedy=remedy)
    if found := re.search(r"Could not (override|delete)[ \w.]* '(.+?)'", said):
        key = found.group(2).partition("@")[0]
        value = _value_of(key, overrides)
        if key not in preset_groups():
            return unknown(key, value, keys(), "" if found.group(1) == "override" else "~")
        problem, allowed = f"{path} has no such group in its defaults", ", ".join(preset_names(key))
        return ConfigurationError(problem, setting=key, value=value, allowed=allowed, remedy=f"Write +{key}={value}.")
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        problem, remedy = f"{path}: {str(error).splitlines()[0]}", f"Set {error.full_key}, or what it refers to."
        return ConfigurationError(problem, remedy=remedy)
    what = "does not compose" if isinstance(error, HydraException) or overrides else "cannot be read"
    return ConfigurationError(f"{path}: {what}. {said}")


def _value_of(key: str, overrides: Sequence[str]) -> str:
    pairs = (each.lstrip("+~").partition("=") for each in overrides)
    return next((value for name, _, value in pairs if name.partition("@")[0] == key), "VALUE")
