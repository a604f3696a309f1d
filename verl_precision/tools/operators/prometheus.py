"""The trainer callback that exports each step's metrics through Ray, for Prometheus (docs/operators.md).

Ray's metrics port shows `ray_` before each name. Ray drops a gauge that is silent for half a minute, and a step may
take longer, so a thread repeats the latest step's values.
"""

import contextlib
import math
import queue
import re
from collections.abc import Collection, Mapping, MutableMapping
from numbers import Real
from typing import Any

from verl_precision.base.files import table_of
from verl_precision.mismatch.alarm import ADVICE
from verl_precision.tools.operators import Outlet

REPEAT_SECONDS = 10
ALARM = "verl_precision_alarm_active"  # a gauge for each alarm: 1 while it is active
HELP: dict[str, str] = table_of(__file__, "help.yaml")  # the definitions of docs/metrics.md, in ASCII


def gauge_name(key: str) -> str:
    """Return the name under which a metric is exported."""
    return "verl_precision_" + re.sub(r"[^a-zA-Z0-9_]", "_", key.removeprefix("actor/"))


def help_of(key: str) -> str:
    """Return the definition of a metric; of one that verl reports itself, its name in verl's log."""
    forms = {re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(form)): words for form, words in HELP.items()}
    found = [words for form, words in forms.items() if re.fullmatch(form, key.removeprefix("actor/"))]
    return found[0] if found else f"{key} in verl's log"


def readings(step: int, metrics: Mapping[str, object], active: Collection[str]) -> dict[tuple[str, str], float]:
    """Return a dictionary: a step's finite metric, or the gauge of an alarm with the alarm's name -> value."""
    numbers = {(key, ""): float(value) for key, value in metrics.items() if isinstance(value, Real)}
    found = {key: value for key, value in numbers.items() if math.isfinite(value)} | {("step", ""): float(step)}
    return found | {(ALARM, name): float(name in active) for name in ADVICE}


class Exporter(Outlet):
    """Exports the metrics of a run."""

    def take(self, step: int, metrics: MutableMapping[str, Any], active: Collection[str]) -> None:
        """Put the step's values into the queue; a step whose values find no place is left out."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(readings(step, metrics, self._trainer.monitor.alarm.active))

    def work(self) -> None:
        """Set a gauge for each of the latest values."""
        from ray.util.metrics import Gauge

        gauges, latest = dict[str, Any](), dict[tuple[str, str], float]()
        run = {"run": _ascii(str(self._trainer.config.trainer.experiment_name))}
        while latest is not None:
            for (key, alarm), value in latest.items():
                name, tags = (key, {**run, "alarm": alarm}) if alarm else (gauge_name(key), run)
                if name not in gauges:
                    words = "1 while the alarm is active" if alarm else _ascii(help_of(key))
                    gauges[name] = Gauge(name, words, tuple(tags))
                gauges[name].set(value, tags)
            with contextlib.suppress(queue.Empty):
                latest = self._queue.get(timeout=REPEAT_SECONDS)


def _ascii(text: str) -> str:
    """Return a text as Ray takes it."""
    return text.encode("ascii", "backslashreplace").decode()
