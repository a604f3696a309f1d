"""Settings of weight syncs: the block `weight_sync` of a config, and the canary's in it."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from verl_precision.base.settings import settings


@settings("weight_sync.canary.{}".format)
class CanarySettings:
    """Settings of the canary: when it runs, on which tokens, and its action."""

    every_n_syncs: int = Field(default=1, ge=0, strict=True)  # compare after every n-th weight sync; 0: never
    sequences: int = Field(default=2, ge=1, strict=True)
    tokens: int = Field(default=32, ge=2, strict=True)  # length of each sequence
    action: Literal["stop", "log"] = Field(default="stop", description="Use stop: it suits every run.")
    timeout_seconds: float = Field(default=120.0, gt=0, strict=True)  # after the trainer has finished sampling


@settings("weight_sync.{}".format)
class SyncSettings:
    """Settings of the rounding of FP32 weights for the rollout."""

    # stochastic: weights are rounded up or down at random, so that small updates reach the rollout on average
    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="nearest rounds as verl does.")


def sync_settings(config: Mapping[str, Any]) -> SyncSettings:
    """Return the settings in a config's block `weight_sync`, without those of the canary."""
    block = config.get("weight_sync") or {}
    return SyncSettings(**{key: value for key, value in block.items() if key != "canary"})


def canary_settings(config: Mapping[str, Any]) -> CanarySettings:
    """Return the settings in a config's block `weight_sync.canary`; missing settings have their defaults."""
    return CanarySettings(**((config.get("weight_sync") or {}).get("canary") or {}))
