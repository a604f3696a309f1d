"""Settings of weight syncs: the block `weight_sync` of a config, and the canary's in it."""

from __future__ import annotations

from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.base.settings import settings


@settings("weight_sync.canary.{}".format)
class CanarySettings:
    """When the served log-probs are compared with the trainer's, on what, and what a difference leads to."""

    every_n_syncs: int = Field(default=1, ge=0, strict=True)  # compare after every n-th weight sync; 0: never
    sequences: int = Field(default=2, ge=1, strict=True)
    tokens: int = Field(default=32, ge=2, strict=True)  # length of each sequence
    action: Literal["stop", "log"] = Field(default="stop", description="The value stop suits every run.")
    timeout_seconds: float = Field(default=120.0, gt=0, strict=True)  # after the trainer has finished sampling


@settings("weight_sync.{}".format)
class SyncSettings:
    """How FP32 weights become the rollout's."""

    # stochastic: rounded up or down at random before they leave, so that small updates are served on average
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="The value nearest is as in verl."
    )


def sync_settings(config: DictConfig) -> SyncSettings:
    """Return the settings in a config's block `weight_sync`, those of the canary left out."""
    block: Any = OmegaConf.select(config, "weight_sync") or {}
    return SyncSettings(**{key: value for key, value in block.items() if key != "canary"})


def canary_settings(config: DictConfig) -> CanarySettings:
    """Return the settings in a config's block `weight_sync.canary`; what it leaves out has its default."""
    block: Any = OmegaConf.select(config, "weight_sync.canary")
    return CanarySettings() if block is None else CanarySettings(**OmegaConf.to_container(block, resolve=True))
