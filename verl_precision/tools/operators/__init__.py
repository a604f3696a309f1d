"""A run tells an operator how it is: messages of its alarms, metrics for Prometheus (docs/operators.md).

`grafana.json` is a dashboard of these metrics, and `alerts.yaml` has a rule for each alarm.
"""

import contextlib
import queue
import threading
from typing import Any

from verl_precision.base.loggers import mismatch as logger

END_SECONDS = 5  # longest wait at the end of a run


class Outlet:
    """A trainer callback whose thread, `work`, sends what `take` puts into a queue; a step never waits for it."""

    take: Any  # gets step and metrics after each step, and the alarms that were active before it
    work: Any  # ends after None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=32)

    def fit(self, proceed: Any, *args: Any, **kwargs: Any) -> None:
        """Train; then wait for what is under way, but not for long."""
        (thread := threading.Thread(target=self.work, daemon=True)).start()
        try:
            proceed(*args, **kwargs)
        finally:
            with contextlib.suppress(queue.Full):  # the thread hangs
                self._queue.put_nowait(None)
            thread.join(END_SECONDS)
            if thread.is_alive():
                logger.warning("the run ends; what its %s had still to send may be lost", type(self).__name__)

    def _compute_metrics(self, proceed: Any, batch: Any, metrics: Any, *args: Any, **more: Any) -> None:
        active = self._trainer.monitor.alarm.active
        try:
            proceed(batch, metrics, *args, **more)
        finally:  # an alarm may end the run
            self.take(more["global_steps"], metrics, active)
