"""When a run saves beside `trainer.save_freq`: by time, and when SIGUSR1 or SIGTERM asks for it.

verl's driver, which gets the signals, only waits; the trainer is a busy actor of Ray's, perhaps on another host. So a
signal leaves an empty file in the run's folder, which every host sees and `touch` makes as well, and the trainer takes
it away at the end of a step. After SIGTERM it saves and ends the run. A second SIGTERM ends it at once, and so does the
first where no checkpoints are saved, or before Ray has started; the exit code is 1 then, where Ray's `ray.get` makes
that of any other. Requests that a killed run has left are void.
"""

import logging
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.base.settings import settings
from verl_precision.integration.ledger import lost_symbols

SAVE, END, ENDING = ".save_requested", ".end_requested", ".ending"  # the last is the trainer's answer to the second
ENDED = 128 + signal.SIGTERM  # exit code of a run that has ended because it was asked to

logger = logging.getLogger("verl_precision")


@settings("checkpoint.{}".format)
class CheckpointSettings:
    """The block `checkpoint` of a config.

    Attributes:
        every_minutes: A run saves at the end of a step when its last checkpoint is so old, and after its last step;
            ≥ 0. 0: never.
    """

    every_minutes: float = Field(default=0.0, ge=0, strict=True, allow_inf_nan=False, description="Set 60, or 0: off.")


def checkpoint_settings(config: DictConfig) -> CheckpointSettings:
    """Return the settings in a config's block `checkpoint`; what it leaves out has its default."""
    block: Any = OmegaConf.select(config, "checkpoint") or {}
    return CheckpointSettings(**block)


def every_minutes(config: DictConfig) -> float:
    """Return `checkpoint.every_minutes` for rules: 0 for a value that another rule refuses, and for verl's trainers."""
    minutes, measured = (OmegaConf.select(config, name) for name in ("checkpoint.every_minutes", "mismatch.enabled"))
    read = measured is not False or str(OmegaConf.select(config, "trainer.v1.trainer_mode")).startswith("vp_")
    return minutes if read and isinstance(minutes, int | float) and 0 < minutes < math.inf else 0


def saves(config: DictConfig) -> bool:
    """Return whether a run saves checkpoints, by steps or by time."""
    return (config.trainer.save_freq or 0) > 0 or every_minutes(config) > 0


class SavePlan:
    """Decides, at the end of each step, whether the trainer saves one more checkpoint, and whether the run ends."""

    def __init__(self, config: DictConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._now = Path(config.trainer.default_local_dir), now
        self._seconds = 60 * checkpoint_settings(config).every_minutes
        self.saved()

    def saved(self) -> None:
        """Count the time from here: a checkpoint has all that was learned."""
        self._last = self._now()

    def due(self, last_step: bool = False) -> bool:
        """Return whether it is time for a checkpoint (as it is after the last step), or one was asked for, once."""
        by_time = self._seconds > 0 and (last_step or self._now() - self._last >= self._seconds)
        return self._taken(SAVE) or by_time

    def asked_to_end(self) -> bool:
        """Return whether the run was asked to end, once; the driver will find that it was."""
        if asked := self._taken(END):
            (self._folder / ENDING).touch()
        return asked

    def _taken(self, request: str) -> bool:
        try:
            (self._folder / request).unlink()
        except FileNotFoundError:
            return False
        return True


class SignalRequests:
    """Hears the signals of one run's driver, and leaves the requests."""

    def __init__(self, folder: Path, saves: bool) -> None:
        self.folder, self.saves, self._ending = folder, saves, False

    def listen(self) -> None:
        """Handle SIGUSR1 from now on, and SIGTERM once Ray has started: `ray.init` sets a handler of its own."""
        self._forget()
        signal.signal(signal.SIGUSR1, self.hear)
        if lost := lost_symbols("SIGTERM"):
            logger.warning("SIGTERM ends this run at once, and saves nothing: %s", lost)
            return
        from ray._private.worker import _post_init_hooks

        _post_init_hooks.append(lambda: signal.signal(signal.SIGTERM, self.hear))

    def hear(self, number: int, frame: object = None) -> None:
        """Leave the request that a signal stands for.

        Raises:
            SystemExit: Where a SIGTERM is to end the run at once.
        """
        if number == signal.SIGUSR1:
            logger.warning("SIGUSR1: a checkpoint is saved at the end of the step under way")
        elif self._ending or not self.saves:
            logger.warning("SIGTERM: the run ends at once, and goes on from its last checkpoint, if there is one")
            sys.exit(ENDED)
        else:
            self._ending = True
            logger.warning("SIGTERM: the run saves and ends at the end of this step; a second one ends it at once")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / (END if self._ending else SAVE)).touch()
        except OSError:  # raised here, it would end the run
            logger.exception("the trainer cannot be asked in %s", self.folder)

    def end(self, completed: bool) -> None:
        """Leave nothing behind when the job is over.

        Raises:
            SystemExit: With `ENDED`, if the job is complete because the trainer was asked to end.
        """
        ended = completed and (self.folder / ENDING).exists()
        self._forget()
        if ended:
            logger.warning("the run has ended because it was asked to; the same command goes on")
            sys.exit(ENDED)

    def _forget(self) -> None:
        for request in (SAVE, END, ENDING):
            (self.folder / request).unlink(missing_ok=True)
