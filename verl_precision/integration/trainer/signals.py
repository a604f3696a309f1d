"""SIGUSR1 and SIGTERM in the driver: a checkpoint at the end of the step under way; after SIGTERM the run ends.

verl's driver only waits, and the trainer is a busy actor of Ray's, perhaps on another host. So a signal leaves an empty
file in the run's folder, which every host sees, and the trainer takes it away at the end of a step: `touch` does the
same. A second SIGTERM ends the run at once, and so does the first where the run saves no checkpoints, or Ray has not
started. A request that a killed run has left is void.
"""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

SAVE, END, ENDING = ".save_requested", ".end_requested", ".ending"
ENDED = 128 + signal.SIGTERM  # exit code of a run that SIGTERM has ended; after the last step it is verl's own

logger = logging.getLogger("verl_precision")


def take(folder: Path, request: str) -> bool:
    """Return whether somebody has asked for it, and take the request away; of `END` the driver finds `ENDING`."""
    try:
        if request == END:
            (folder / END).replace(folder / ENDING)
        else:
            (folder / request).unlink()
    except FileNotFoundError:
        return False
    return True


class SignalRequests:
    """Hears the signals of one run's driver."""

    def __init__(self, folder: Path, saves: bool) -> None:
        self.folder, self.saves, self.ending = folder, saves, False

    def listen(self) -> None:
        """Handle SIGUSR1 from now on, and SIGTERM once Ray has started, which handles it first and ends the driver."""
        from ray._private.worker import _post_init_hooks

        self._forget()
        signal.signal(signal.SIGUSR1, self._save)
        _post_init_hooks.append(lambda: signal.signal(signal.SIGTERM, self._end))

    def end(self, completed: bool) -> None:
        """Leave nothing behind when the job is over.

        Raises:
            SystemExit: With `ENDED`, if the trainer has ended the job because it was asked to, and saved.
        """
        ended = completed and (self.folder / ENDING).exists()
        self._forget()
        if ended:
            logger.warning("the run has ended because it was asked to. The same command goes on from its checkpoint")
            sys.exit(ENDED)

    def _forget(self) -> None:
        for request in (SAVE, END, ENDING):
            (self.folder / request).unlink(missing_ok=True)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self._ask(SAVE)
        logger.warning("SIGUSR1: a checkpoint is saved at the end of the step under way")

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.ending or not self.saves:
            logger.warning("SIGTERM: the run ends at once, and goes on from its last checkpoint, if there is one")
            sys.exit(ENDED)
        self.ending = True
        self._ask(END)
        logger.warning("SIGTERM: the run saves and ends at the end of the step under way; a second one ends it at once")

    def _ask(self, request: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / request).touch()
        except OSError:  # raised here, it would end the run
            logger.exception("the trainer cannot be asked: %s", self.folder / request)
