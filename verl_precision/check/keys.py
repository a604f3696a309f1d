"""Refuses words and keys that Hydra accepts silently and verl cannot use, before anything is computed.

Also the keys of a config, the keys that verl 0.4 to 0.9.0 had (`keys.yaml`), and the keys that only one main reads.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ROLLOUT
from verl_precision.presets import preset_groups

TABLE_OF_KEYS: dict[str, dict[str, str]] = table_of(__file__)  # section -> old key -> today's key, or an advice


def require_overrides(words: Sequence[str]) -> None:
    """Refuse words that are no Hydra overrides, and two presets of one group, of which Hydra takes the last.

    Raises:
        ConfigurationError: For the first such word, with the correct word.
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
    """Return the error for a value whose reference to other values fails."""
    problem, remedy = f"{where}: {str(error).splitlines()[0]}", f"Set {error.full_key}, or what it refers to."
    return ConfigurationError(problem, remedy=remedy)


def keys_of(node: object, path: str = "") -> Iterator[str]:
    """Yield each key of a config, blocks too."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{path}{key}"
            yield from keys_of(value, f"{path}{key}.")


def row_of(key: str) -> tuple[str, str, str]:
    """Return section, content and remaining path for the longest key of the table that is this key or a block of it."""
    best: tuple[int, str, str, str] = (0, "", "", "")
    for section, rows in TABLE_OF_KEYS.items():
        for old, content in rows.items():
            pattern = r"(.+\.)?" + re.escape(old[2:]) if old.startswith("*.") else re.escape(old)
            if (found := re.match(rf"{pattern}(?=\.|$)", key)) and len(old) > best[0]:
                best = len(old), section, content, key[found.end() :]
    return best[1:]


def unread_word(config: DictConfig, key: str, value: object) -> ConfigurationError | None:
    """Return the error for a setting that only `fully_async_main` reads; None for any other setting."""
    section, row, rest = row_of(key)
    if section != "unread" or value in ("null", "", None) or "async_training" in config:
        return None
    problem = "verl still has this setting, but this main reads another one: the value has no effect"
    remedy = f"Write {row}{rest}={value}."
    return ConfigurationError(problem, setting=key, value=value, allowed=f"{row}{rest}", remedy=remedy)
