"""What the measuring trainer does at each point of a step, without being a trainer: measure, judge and remember."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import MismatchAlarmError
from verl_precision.files import write_file
from verl_precision.integration.histogram_loggers import log_histograms
from verl_precision.integration.measurement import MISMATCH, PHANTOM, REQUEST, Request
from verl_precision.mismatch.alarm import MismatchAlarm, act_on
from verl_precision.mismatch.metric_names import ACTOR
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.mismatch.statistics import MismatchStatistics

ALARM_FILE = "mismatch_alarm.json"
# What the worker reports about an update of the actor loses verl's prefix.
OURS = ("mismatch/", "phantom/", "precision/", "weight_sync/")

logger = logging.getLogger("verl_precision.mismatch")


class RunMonitor:
    """Measures, judges and remembers for one run.

    Attributes:
        settings: The block `mismatch`.
        alarm: Fed every step.
        bypass: Whether verl skips the forward at θ', so that the worker has to measure.
        shadowed: Whether the actor has a shadow.
        clip_range: ε_low and ε_high of the loss.
    """

    def __init__(self, config: DictConfig, settings: MismatchSettings, on_policy: bool) -> None:
        """Read what decides where to measure.

        Args:
            config: The composed config.
            settings: Its block `mismatch`.
            on_policy: Whether a batch is always drawn with the weights that are about to be updated.
        """
        self.settings = settings
        self.alarm = MismatchAlarm(settings.alarm)
        self.bypass = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
        actor = config.actor_rollout_ref.actor
        shadow = OmegaConf.select(actor, "fsdp_config.shadow") or {}
        self.shadowed = shadow.get("ratio_source") == "shadow" or (shadow.get("every_n_steps") or 0) > 0
        low, high = (actor.get(f"clip_ratio_{side}") for side in ("low", "high"))
        default = actor.clip_ratio
        self.clip_range = (float(default if low is None else low), float(default if high is None else high))
        self._on_policy = on_policy
        self._measuring = True
        self._mismatch: MismatchStatistics | None = None
        self._seconds = 0.0

    def measure_in_driver(self, batch: Any, metrics: MutableMapping[str, Any]) -> None:
        """In decoupled mode, measure what verl has computed already; in bypass mode there is nothing yet."""
        if self.bypass or not self._measuring:
            return
        with self._guarded():
            trainer, rollout, mask, advantages = _fetch(batch)
            threshold = self.settings.ratio_threshold
            self._mismatch = MismatchStatistics.measure(trainer, rollout, mask, advantages, threshold)
            metrics.update(self._mismatch.metrics())
            if self._on_policy and not self.shadowed:
                # Same weights on both sides, so that the whole gap is beta, and mu stands for the shadow.
                clip_range = self.clip_range
                phantom = PhantomStatistics.measure(trainer, rollout, rollout, mask, advantages, None, *clip_range)
                metrics.update(phantom.metrics())

    def ask_the_worker(self, batch: Any) -> None:
        """Have the next update measured where the driver cannot."""
        if self._measuring and (self.bypass or self.shadowed):
            batch.extra_info[REQUEST] = Request(
                mismatch=self.bypass,
                bypass=self.bypass,
                clip_range=self.clip_range,
                ratio_threshold=self.settings.ratio_threshold,
            )

    def take_from_the_worker(self, metrics: MutableMapping[str, Any]) -> None:
        """Turn the statistics that came back into metrics, and give this package's metrics their own names."""
        self._mismatch = metrics.get(ACTOR + MISMATCH, self._mismatch)
        for key in (MISMATCH, PHANTOM):
            if ACTOR + key in metrics:
                metrics.update(metrics.pop(ACTOR + key).metrics())
        for key in [key for key in metrics if key.startswith(tuple(ACTOR + ours for ours in OURS))]:
            metrics[key.removeprefix(ACTOR)] = metrics.pop(key)

    def judge(self, step: int, metrics: MutableMapping[str, Any]) -> MismatchAlarmError | None:
        """Feed the alarm, say what it raises, and return the error that is to end the run, if one is.

        Args:
            step: Of training.
            metrics: Of this step; `alarm/active` and `timing_s/mismatch` are added.
        """
        stop, start = None, time.perf_counter()
        try:
            act_on(self.alarm.update(step, metrics), self.settings.alarm, log=logger.warning)
        except MismatchAlarmError as error:
            stop = error
        metrics["alarm/active"] = len(self.alarm.active)
        metrics["timing_s/mismatch"], self._seconds = self._seconds + time.perf_counter() - start, 0.0
        return stop

    def show_histograms(self, tracking: Any, step: int) -> None:
        """Give the histogram of the gap to the loggers that can show it."""
        mismatch, self._mismatch = self._mismatch, None
        if mismatch is not None and self.settings.histograms and self._measuring:
            with self._guarded():
                log_histograms(tracking, mismatch.histograms(), step)

    def save(self, folder: str) -> None:
        """Write the alarm's memory beside a checkpoint."""
        write_file(Path(folder) / ALARM_FILE, json.dumps(self.alarm.state_dict()), replace=True)

    def load(self, folder: str) -> None:
        """Take over the alarm's memory of a checkpoint, if it has one."""
        path = Path(folder) / ALARM_FILE
        if path.is_file():
            self.alarm.load_state_dict(json.loads(path.read_text()))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time a measurement; if it fails, say so, and never measure again in this run, which goes on."""
        start = time.perf_counter()
        try:
            yield
        except Exception:  # somebody's run is under way, and does not need these numbers
            self._measuring = False
            logger.exception("the mismatch could not be measured; it is left out from now on, training goes on")
        finally:
            self._seconds += time.perf_counter() - start


def _fetch(batch: Any) -> list[Any]:
    """Return the trainer's and the rollout's log-probs, the mask and the advantages of a batch, nested.

    Padded to the longest response, a batch of long ones would take gigabytes in the driver.
    """
    import transfer_queue as tq

    kept = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = ["old_log_probs", "rollout_log_probs", "response_mask", "advantages"]
    data = tq.kv_batch_get(keys=kept, partition_id=batch.partition_id, select_fields=fields)
    return [torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged) for name in fields]
