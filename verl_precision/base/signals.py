"""SIGTERM (`timeout`, docker stop, kill) and SIGHUP (a closed terminal) end a command as Ctrl-C does."""

import signal
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAKE_SECONDS = 0.5
_DEAF_SECONDS = 60.0  # longer than any clean-up; later the first signal counts as lost, e.g. in a destructor


@contextmanager
def ended_by_signals(process_ends: bool = False) -> Iterator[list[int]]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the block; the yielded list gets the signal's number.

    Later signals are ignored, because they would interrupt the clean-up that the first signal has begun. A signal that
    is already ignored (nohup), or has another handler, stays as it is. In a thread other than the main thread nothing
    changes. With `process_ends`, signals stay ignored after the block too.
    """
    heard: list[int] = []
    deaf_until = 0.0

    def hear(number: int, frame: object) -> None:
        nonlocal deaf_until
        if time.monotonic() >= deaf_until:
            deaf_until, heard[:] = time.monotonic() + _DEAF_SECONDS, [number]
            raise KeyboardInterrupt

    ours = (signal.SIG_DFL, signal.default_int_handler)
    numbers = _ENDING if threading.current_thread() is threading.main_thread() else ()
    former = {number: handler for number in numbers if (handler := signal.getsignal(number)) in ours}
    try:
        for number in former:
            signal.signal(number, hear)
        yield heard
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if heard and process_ends else handler)


def completed(futures: Collection[Future[Any]]) -> Iterator[Future[Any]]:
    """Yield futures as they complete, in the main thread, so that signals are handled meanwhile.

    The system may deliver two signals at once to another thread. The wait of this thread is then not interrupted, so it
    also ends by a timeout.
    """
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_WAKE_SECONDS, return_when=FIRST_COMPLETED)
        yield from done
