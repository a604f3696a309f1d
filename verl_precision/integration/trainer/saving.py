"""When a run saves beside verl's `trainer.save_freq`: by time, and when somebody asks (`signals.py`)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.base.settings import settings
from verl_precision.integration.trainer.signals import END, SAVE, take


@settings("checkpoint.{}".format)
class CheckpointSettings:
    """The block `checkpoint` of a config.

    Attributes:
        every_minutes: After so many minutes without a checkpoint, a run saves at the end of the step; ≥ 0. 0: by
            `trainer.save_freq` alone.
    """

    every_minutes: float = Field(default=0.0, ge=0, strict=True, allow_inf_nan=False, description="Set 60, or 0: off.")


def checkpoint_settings(config: DictConfig) -> CheckpointSettings:
    """Return the settings in a config's block `checkpoint`; what it leaves out has its default."""
    block: Any = OmegaConf.select(config, "checkpoint") or {}
    return CheckpointSettings(**block)


def saves(config: DictConfig) -> bool:
    """Return whether a run saves checkpoints, by steps or by time."""
    return config.trainer.save_freq > 0 or every_minutes(config) > 0


def every_minutes(config: DictConfig) -> float:
    """Return `checkpoint.every_minutes` for rules: 0 for a value that another rule refuses."""
    minutes = OmegaConf.select(config, "checkpoint.every_minutes")
    return minutes if isinstance(minutes, int | float) else 0


class SavePlan:
    """Decides, at the end of each step, whether the trainer saves one more checkpoint."""

    def __init__(self, config: DictConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._now = Path(config.trainer.default_local_dir), now
        self._seconds = 60 * checkpoint_settings(config).every_minutes
        self._last = now()

    def saved(self) -> None:
        """Count the time from here: there is a checkpoint of what was learned, or nothing was learned yet."""
        self._last = self._now()

    def asked_to_end(self) -> bool:
        """Return whether somebody has asked the run to end; the answer is given once."""
        return take(self._folder, END)

    def due(self) -> bool:
        """Return whether somebody has asked for a checkpoint, which counts once, or it is time for one."""
        return take(self._folder, SAVE) or 0 < self._seconds <= self._now() - self._last
