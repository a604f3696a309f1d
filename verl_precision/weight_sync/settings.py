"""Settings of the canary: the block `weight_sync.canary` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import ConfigurationError

ACTIONS = ("stop", "log")


@dataclass(frozen=True)
class CanarySettings:
    """When the served log-probs are compared with the trainer's, on what, and what a difference leads to.

    Attributes:
        every_n_syncs: compare after every n-th weight sync; 0 switches the canary off.
        sequences: fixed token sequences.
        tokens: tokens of each sequence.
        action: `stop` ends the run when a replica's log-probs are not the trainer's; `log` only says so.
        timeout_seconds: how long a replica may take to answer, counted from the moment at which the trainer has
            finished sampling the step.
    """

    every_n_syncs: int = 1
    sequences: int = 2
    tokens: int = 32
    action: str = "stop"
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        """Check the bounds of every setting.

        Raises:
            ConfigurationError: naming setting, value, what is allowed and what to do.
        """
        for name, least in (("every_n_syncs", 0), ("sequences", 1), ("tokens", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _refused(name, value, f"a whole number, {least} or more", "Leave it out for the default.")
        if self.action not in ACTIONS:
            raise _refused("action", self.action, " or ".join(ACTIONS), "The value stop suits every run.")
        if isinstance(self.timeout_seconds, bool) or not isinstance(self.timeout_seconds, int | float):
            raise _refused("timeout_seconds", self.timeout_seconds, "a positive number", "Leave it out for 120.")
        if not self.timeout_seconds > 0:
            raise _refused("timeout_seconds", self.timeout_seconds, "a positive number", "Leave it out for 120.")

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | None) -> CanarySettings:
        """Return the settings of a config's block `weight_sync.canary`; what it leaves out has its default.

        Args:
            block: plain Python; None for no block.

        Raises:
            ConfigurationError: for a key there is none of, and for values out of bounds.
        """
        values = dict(block or {})
        known = {f.name for f in fields(cls)}
        for name in sorted(values.keys() - known):
            raise _refused(
                name, values[name], ", ".join(sorted(known)), "There is no such setting: check its spelling."
            )
        return cls(**values)


def canary_settings(config: DictConfig) -> CanarySettings:
    """Return the typed settings of a composed config's block `weight_sync.canary`.

    Args:
        config: the composed config.

    Raises:
        ConfigurationError: for a block that cannot be used.
    """
    block = OmegaConf.select(config, "weight_sync.canary")
    return CanarySettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))  # type: ignore[arg-type]


def _refused(name: str, value: object, allowed: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"weight_sync.canary.{name}", value=value, allowed=allowed, remedy=remedy)
