"""Settings of the canary: the block `weight_sync.canary` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.settings import settings


@settings("weight_sync.canary.{}".format)
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

    every_n_syncs: int = Field(default=1, ge=0, strict=True)
    sequences: int = Field(default=2, ge=1, strict=True)
    tokens: int = Field(default=32, ge=2, strict=True)
    action: Literal["stop", "log"] = Field(default="stop", description="The value stop suits every run.")
    timeout_seconds: float = Field(default=120.0, gt=0, strict=True)

    @classmethod
    def from_block(cls, block: Mapping[str, Any] | None) -> CanarySettings:
        """Return the settings of a config's block `weight_sync.canary`; what it leaves out has its default.

        Args:
            block: plain Python; None for no block.

        Raises:
            ConfigurationError: for a key there is none of, and for values out of bounds.
        """
        return cls(**(block or {}))


def canary_settings(config: DictConfig) -> CanarySettings:
    """Return the typed settings of a composed config's block `weight_sync.canary`.

    Args:
        config: the composed config.

    Raises:
        ConfigurationError: for a block that cannot be used.
    """
    block = OmegaConf.select(config, "weight_sync.canary")
    return CanarySettings.from_block(None if block is None else OmegaConf.to_container(block, resolve=True))  # type: ignore[arg-type]
