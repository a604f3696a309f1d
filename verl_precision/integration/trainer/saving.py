"""Checkpoints beside `trainer.save_freq`: at intervals of time, and after SIGUSR1 or SIGTERM.

verl's driver receives the signals, but the trainer is a Ray actor, perhaps on another host. So a signal creates an
empty file in the run's folder (`touch` works too), and the trainer removes it at the end of a step. After SIGTERM it
saves and ends the run. A second SIGTERM, or the first of a run without checkpoints, ends the run at once.
"""

import math
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from verl_precision.base.errors import MismatchAlarmError
from verl_precision.base.loggers import general as logger
from verl_precision.base.settings import settings
from verl_precision.integration.ledger import lost_symbols
from verl_precision.integration.trainer.checkpoints import LAST_FILE, QUEUE, keep_checkpoint_before
from verl_precision.integration.trainer.metrics_file import series_goes_on

SAVE, END, ENDING = ".save_requested", ".end_requested", ".ending"  # the trainer answers END with ENDING
EXIT_ASKED_TO_END = 128 + signal.SIGTERM  # exit code of a run that has ended on request


@settings("checkpoint.{}".format)
class CheckpointSettings:
    """The block `checkpoint`: a run saves after its last step, and `every_minutes` after its latest checkpoint."""

    every_minutes: float = Field(default=0.0, ge=0, strict=True, allow_inf_nan=False, description="Set 60, or 0: off.")


def checkpoint_settings(config: DictConfig) -> CheckpointSettings:
    """Return the settings in a config's block `checkpoint`; missing ones have their defaults."""
    return CheckpointSettings(**(OmegaConf.select(config, "checkpoint") or {}))


def every_minutes(config: DictConfig) -> float:
    """Return `checkpoint.every_minutes` for rules: 0 for a value that another rule refuses, and for verl's trainers."""
    minutes, measured = (OmegaConf.select(config, name) for name in ("checkpoint.every_minutes", "mismatch.enabled"))
    read = measured is not False or str(OmegaConf.select(config, "trainer.v1.trainer_mode")).startswith("vp_")
    return minutes if read and isinstance(minutes, int | float) and 0 < minutes < math.inf else 0


def saves(config: DictConfig) -> bool:
    """Return whether a run saves checkpoints, by steps or by time."""
    return (config.trainer.save_freq or 0) > 0 or every_minutes(config) > 0


class Saving:
    """The trainer callback that saves, marks checkpoints and ends the run on request; it is the outermost callback.

    verl saves before the alarm has judged the step. So the alarm's state is written again after that.
    """

    def __init__(self, trainer: Any, now: Callable[[], float] = time.monotonic) -> None:
        """Begin to count the time to the next checkpoint."""
        self._trainer, self._now = trainer, now
        self._folder = Path(trainer.config.trainer.default_local_dir)
        self._seconds = 60 * checkpoint_settings(trainer.config).every_minutes
        self._saved_step: int | None = None
        self._saved_at = now()

    def fit(self, proceed, *args, **kwargs):
        """Train, unless a request to end came while verl was loading: nothing was learned yet."""
        if self._asked_to_end():
            return
        self._saved_at = self._now()
        with series_goes_on(self._trainer.global_steps):  # step of the loaded checkpoint
            proceed(*args, **kwargs)

    def on_step_end(self, proceed):
        """Save if a checkpoint is due, and end on request; after the last step verl ends by itself."""
        # At this point verl has saved, if `save_freq` requires it.
        trainer = self._trainer
        last = trainer.global_steps >= trainer.total_training_steps
        ends = not last and self._asked_to_end()
        if (self._is_due(last) or ends) and self._saved_step != trainer.global_steps:
            start = time.perf_counter()
            trainer._save_checkpoint()
            trainer.timing_raw["save_checkpoint"] = time.perf_counter() - start
        if ends:
            end_with_this_step(trainer)
        proceed()

    def _compute_metrics(self, proceed, batch, metrics, *args, **more):
        trainer, stop = self._trainer, None
        try:
            proceed(batch, metrics, *args, **more)
        except MismatchAlarmError as error:
            stop = error
        if trainer.monitor.first_alarm_step is not None:
            keep_checkpoint_before(trainer.monitor.first_alarm_step, self._folder)
        if stop is not None:
            trainer.logger.log(data=metrics, step=trainer.global_steps)
            if self._saved_step != trainer.global_steps:  # with keep=1 verl removes a step saved twice
                if trainer.config.trainer.v1.trainer_mode == "sync":  # vLLM is awake already, and saving needs memory
                    trainer.checkpoint_manager.sleep_replicas()
                trainer._save_checkpoint()
        if self._saved_step == trainer.global_steps:
            trainer.monitor.save(self._checkpoint(), metrics)
        if stop is not None:
            raise stop

    def _save_checkpoint(self, proceed):
        trainer, checkpoint = self._trainer, self._checkpoint()
        # An earlier start may have saved this step: until verl has written all of it anew, it is not complete.
        (checkpoint / LAST_FILE).unlink(missing_ok=True)
        if (checkpoint / QUEUE).is_dir():
            shutil.rmtree(checkpoint / QUEUE)
        proceed()
        trainer.monitor.save(checkpoint, {})  # the step's metrics follow at its end
        self._saved_at, self._saved_step = self._now(), trainer.global_steps

    def _load_checkpoint(self, proceed):
        result, trainer = proceed(), self._trainer
        if trainer.global_steps:  # 0: from scratch
            settings = trainer.config.trainer
            by_path = settings.resume_mode == "resume_path"
            trainer.monitor.load(Path(settings.resume_from_path) if by_path else self._checkpoint())
        return result

    def _checkpoint(self) -> Path:
        return self._folder / f"global_step_{self._trainer.global_steps}"

    def _is_due(self, last_step: bool) -> bool:
        """Return whether a checkpoint is due by time, by the last step, or by a request, which is removed."""
        by_time = self._seconds > 0 and (last_step or self._now() - self._saved_at >= self._seconds)
        return self._taken(SAVE) or by_time

    def _asked_to_end(self) -> bool:
        """Return whether a request to end the run exists; replace it by a file for the driver."""
        if asked := self._taken(END):
            (self._folder / ENDING).touch()
        return asked

    def _taken(self, request: str) -> bool:
        try:
            (self._folder / request).unlink()
        except FileNotFoundError:
            return False
        return True


def end_with_this_step(trainer: Any) -> None:
    """Make the current step the last one of verl's loop, which ends when the step is logged."""
    trainer.total_training_steps = trainer.global_steps


class SignalRequests:
    """Receives the signals of one run's driver, and creates the request files."""

    def __init__(self, folder: Path, saves: bool) -> None:
        self.folder, self.saves, self._ending = folder, saves, False

    def listen(self) -> None:
        """Handle SIGUSR1 from now on, and SIGTERM once Ray has started: `ray.init` sets a handler of its own."""
        self._forget()
        signal.signal(signal.SIGUSR1, self.on_signal)
        if lost := lost_symbols("SIGTERM"):
            logger.warning("SIGTERM ends this run at once without saving: %s", lost)
            return
        from ray._private.worker import _post_init_hooks

        _post_init_hooks.append(lambda: signal.signal(signal.SIGTERM, self.on_signal))

    def on_signal(self, number: int, frame: object = None) -> None:
        """Create a signal's request file, or end the run at once."""
        if number == signal.SIGUSR1:
            logger.warning("SIGUSR1: the run saves a checkpoint at the end of the current step")
        elif self._ending or not self.saves:
            logger.warning("SIGTERM: the run ends at once; its next start resumes from the last checkpoint, if any")
            sys.exit(EXIT_ASKED_TO_END)
        else:
            self._ending = True
            logger.warning("SIGTERM: the run saves and ends after this step; a second SIGTERM ends it at once")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / (END if self._ending else SAVE)).touch()
        except OSError:  # raised here, it would end the run
            logger.exception("the trainer does not receive signals in %s", self.folder)

    def end(self, completed: bool) -> None:
        """Remove the request files; exit with `EXIT_ASKED_TO_END` if the job is complete because of a request."""
        ended = completed and (self.folder / ENDING).exists()
        self._forget()
        if ended:
            logger.warning("the run ended on request; the same command resumes it")
            sys.exit(EXIT_ASKED_TO_END)

    def _forget(self) -> None:
        for request in (SAVE, END, ENDING):
            (self.folder / request).unlink(missing_ok=True)
