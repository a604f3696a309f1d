"""The trainer callback that sends alarms to a person, `mismatch.alarm.notify` (docs/operators.md).

One thread sends; a step only puts a message into a queue. No message of a failure contains a URL or an argument.
"""

import contextlib
import contextvars
import json
import math
import os
import shlex
import subprocess
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from verl_precision.mismatch.alarm import ADVICE, CAUSES, Alarm
from verl_precision.mismatch.settings import LOGGERS_WITH_ALERTS
from verl_precision.tools.operators import Outlet, logger

SECONDS = 10  # of one delivery
FAILED_MESSAGES = "alarm/failed_messages"


def to_send(raised: Iterable[Alarm], active: Collection[str]) -> list[Alarm]:
    """Return the alarms of a step to send: one a cause while that is active, and a severe one after a milder one."""
    sent, found = {*active}, []
    for alarm in sorted(raised, key=lambda alarm: not alarm.advice.severe):
        cause = next(cause for cause in CAUSES.values() if alarm.name in cause)
        if not any(name in cause and ADVICE[name].severe >= alarm.advice.severe for name in sent):
            found.append(alarm)
        sent.add(alarm.name)
    return found


def message_of(alarm: Alarm, run: str) -> dict[str, Any]:
    """Return an alarm as plain JSON; `text` is what Slack shows."""
    advice, value = alarm.advice, alarm.seen if math.isfinite(alarm.seen) else str(alarm.seen)
    return {
        "text": f"{run}: {alarm}\n  Common mistake: {advice.mistake}\n  More: docs/symptoms.md#each-alarm",
        **{"run": run, "alarm": alarm.name, "step": alarm.step, "since_step": alarm.since_step},
        **{"metric": alarm.metric, "value": value, "normal": alarm.normal, "meaning": advice.meaning},
        **{"try_first": list(advice.try_first), "mistake": advice.mistake, "severe": advice.severe},
    }


class Notifier(Outlet):
    """Sends the alarms of a run."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._to = to = trainer.monitor.settings.alarm.notify
        self._url, self._words = os.environ.get(to.webhook_env or "", ""), shlex.split(to.command or "")
        self._failed: dict[str, int] = {}  # by target

    def take(self, step: int, metrics: MutableMapping[str, Any], active: Collection[str]) -> None:
        """Put the step's messages into the queue, with the context in which trackio finds its run."""
        for alarm in to_send(self._trainer.monitor.raised, active):
            message = message_of(alarm, str(self._trainer.config.trainer.experiment_name))
            with self._counted("its target, too many wait"):
                self._queue.put_nowait((message, contextvars.copy_context()))
        metrics[FAILED_MESSAGES] = sum(self._failed.values())

    def work(self) -> None:
        """Send each message to each target."""
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        while (item := self._queue.get()) is not None:
            (message, context), body = item, json.dumps(item[0]).encode()
            if self._url:
                with self._counted(f"the webhook at {urlsplit(self._url).hostname}"):
                    urlopen(Request(self._url, body, {"Content-Type": "application/json"}), timeout=SECONDS).close()
            if self._words:
                with self._counted(f"the command {os.path.basename(self._words[0])}"):
                    subprocess.run(self._words, input=body, timeout=SECONDS, check=True, **silent)
            if self._to.logger:
                level, said = "ERROR" if message["severe"] else "WARN", message["text"]
                loggers = self._trainer.logger.logger
                for name in filter(loggers.get, LOGGERS_WITH_ALERTS):
                    of = getattr(loggers[name], "trackio", loggers[name])
                    with self._counted(f"the alerts of {name}"):
                        context.run(of.alert, title=f"ALARM {message['alarm']}", text=said, level=of.AlertLevel[level])

    @contextlib.contextmanager
    def _counted(self, target: str) -> Iterator[None]:
        """Count a failure, and say the first one of a target: it must not end a user's run."""
        try:
            yield
        except Exception as error:
            if target not in self._failed:
                problem = f"{type(error).__name__} {getattr(error, 'code', getattr(error, 'returncode', ''))}".strip()
                logger.warning("an alarm did not reach %s: %s. Later failures are only counted.", target, problem)
            self._failed[target] = self._failed.get(target, 0) + 1
