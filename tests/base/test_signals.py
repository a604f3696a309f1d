"""A signal ends what waits for threads, whichever thread receives it."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_precision.base.signals import completed, ended_by_signals


def test_a_signal_that_another_thread_receives_is_heard():
    """Of two signals at once, SIGTERM and SIGINT, the system gives both to a worker in a quarter of all cases."""
    ended = threading.Event()

    def work() -> None:
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.wait(60)

    start, former = time.monotonic(), signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    with ended_by_signals(), ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            list(completed([pool.submit(work)]))
        ended.set()
    signal.signal(signal.SIGINT, former)
    assert time.monotonic() - start < 30
