"""Refuses settings that Hydra accepts silently and verl cannot use, before anything is computed."""

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import ROLLOUT
from verl_precision.presets import preset_groups


def require_overrides(words: Sequence[str]) -> None:
    """Refuse words that are no Hydra overrides, and two presets of one group, of which Hydra takes the last.

    Raises:
        ConfigurationError: For the first of them, with the word to write.
    """
    chosen: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("-"):
            flag, _, value = word.lstrip("-").partition("=")
            value = value or " ".join(words[index + 1 : index + 2])
            written = f"{flag}={value}" if flag in preset_groups() else "settings as KEY=VALUE"
            problem, allowed = "there is no such option", "the options of --help, and Hydra overrides"
            raise ConfigurationError(problem, setting=word, value=value, allowed=allowed, remedy=f"Write {written}.")
        if not re.match(r"~|[^=]+=", word):
            problem, remedy = f"`{word}` is not an override", "Quote a value with spaces; no spaces around `=`."
            raise ConfigurationError(problem, allowed="KEY=VALUE, +KEY=VALUE or ~KEY", remedy=remedy)
        key, _, name = word.lstrip("+").partition("=")
        if key in preset_groups() and chosen.setdefault(key, name) != name:
            problem = f"{key}={chosen[key]} is given too, and Hydra uses the last one without a message"
            remedy = f"Leave one out. If a script sets one, write {key.upper()}={name} before its name."
            raise ConfigurationError(problem, setting=key, value=name, allowed="one preset", remedy=remedy)


def require_complete(config: DictConfig) -> None:
    """Refuse a config without verl's parts, or without the name of the rollout, which verl leaves to its users."""
    parts = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer")
    if absent := [part for part in parts if part not in config]:
        problem, remedy = f"it has no {', '.join(absent)}", "Begin it with `defaults: [ppo_trainer, _self_]`."
        raise ConfigurationError(f"this is not a config of verl's main_ppo: {problem}", remedy=remedy)
    for block in (*parts, *map("actor_rollout_ref.{}".format, ("actor", "actor.optim", "model", "ref", "rollout"))):
        if not isinstance(value := OmegaConf.select(config, block), DictConfig):
            problem, remedy = "verl has a block of settings there", f"Correct the indent of the lines below {block}."
            raise ConfigurationError(problem, setting=block, value=value, allowed="a block", remedy=remedy)
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        problem, remedy = "verl has no default here, and nothing sets a value", f"Set {ROLLOUT}.name=vllm."
        raise ConfigurationError(problem, setting=f"{ROLLOUT}.name", value="???", allowed="vllm", remedy=remedy)


def unresolved(error: OmegaConfBaseException, where: Path | str) -> ConfigurationError:
    """Return what is wrong with a value that refers to others."""
    problem, remedy = f"{where}: {str(error).splitlines()[0]}", f"Set {error.full_key}, or what it refers to."
    return ConfigurationError(problem, remedy=remedy)
