"""Keys of verl's configs: which a config has, which verl 0.4 to 0.9.0 had (`keys.yaml`), which only one main reads."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import table_of
from verl_precision.check.rules.rule import Fault, fault_of_error


def keys_of(node: object, path: str = "") -> Iterator[str]:
    """Yield each key of a config, blocks too."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{path}{key}"
            yield from keys_of(value, f"{path}{key}.")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting of a plain config that is no block, or an empty one."""
    if not isinstance(node, dict) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


@functools.cache
def table_of_keys() -> dict[str, dict[str, str]]:
    """Return the table: section, key of then, today's key or words."""
    return table_of(__file__)


def row_of(key: str) -> tuple[str, str, str]:
    """Return section, content and the rest below it of the longest key of the table that a key is at or below."""
    best: tuple[int, str, str, str] = (0, "", "", "")
    for section, rows in table_of_keys().items():
        for old, content in rows.items():
            pattern = r"(.+\.)?" + re.escape(old[2:]) if old.startswith("*.") else re.escape(old)
            if (found := re.match(rf"{pattern}(?=\.|$)", key)) and len(old) > best[0]:
                best = len(old), section, content, key[found.end() :]
    return best[1:]


def unread_word(config: DictConfig, key: str, value: object) -> ConfigurationError | None:
    """Return what to say of a setting that only `fully_async_main` carries over, if it is one."""
    section, row, rest = row_of(key)
    if section != "unread" or value in ("null", "", None) or "async_training" in config:
        return None
    problem = "verl still has this setting, but this main reads another one: the value has no effect"
    remedy = f"Write {row}{rest}={value}."
    return ConfigurationError(problem, setting=key, value=value, allowed=f"{row}{rest}", remedy=remedy)


def legacy(config: DictConfig) -> Iterator[Fault]:
    """Yield a fault for each setting that has a value where only `fully_async_main` carries it over."""
    for block in {old.partition(".")[0]: None for old in table_of_keys()["unread"]}:
        node: Any = OmegaConf.to_container(config.get(block) or OmegaConf.create(), resolve=False)
        for key in keys_of(node, f"{block}."):
            value = OmegaConf.select(config, key)
            if not isinstance(value, DictConfig) and (error := unread_word(config, key, value)) is not None:
                yield fault_of_error(error)
