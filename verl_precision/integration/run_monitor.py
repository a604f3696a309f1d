"""One run under watch: what the measuring trainer does at each point of a step, without being a trainer."""

import json
import logging
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import MismatchAlarmError
from verl_precision.files import write_file
from verl_precision.integration.measurement import REQUEST, request
from verl_precision.integration.summed_metrics import MISMATCH, PHANTOM
from verl_precision.mismatch.alarm import MismatchAlarm, act_on
from verl_precision.mismatch.metric_names import ACTOR
from verl_precision.mismatch.phantom import PhantomSums
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.mismatch.statistics import MismatchSums

ALARM_FILE = "mismatch_alarm.json"
# What the worker reports about an update of the actor loses verl's prefix.
OURS = ("mismatch/", "phantom/", "precision/", "weight_sync/")

logger = logging.getLogger("verl_precision.mismatch")


class Watch:
    """Measures, judges and remembers for one run.

    Attributes:
        settings: the block `mismatch`.
        alarm: fed every step.
        bypass: whether verl skips the forward at θ', so that the worker has to measure.
        shadowed: whether the actor has a shadow.
    """

    def __init__(self, config: DictConfig, settings: MismatchSettings, on_policy: bool) -> None:
        """Read what decides where to measure.

        Args:
            config: the composed config.
            settings: its block `mismatch`.
            on_policy: whether a batch is always drawn with the weights that are about to be updated.
        """
        self.settings = settings
        self.alarm = MismatchAlarm(settings.alarm)
        self.bypass = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
        actor = config.actor_rollout_ref.actor
        shadow = OmegaConf.select(actor, "fsdp_config.shadow") or {}
        self.shadowed = shadow.get("ratio_source") == "shadow" or (shadow.get("every_n_steps") or 0) > 0
        low, high = (actor.get(f"clip_ratio_{side}") for side in ("low", "high"))
        default = actor.clip_ratio
        self.clip = (float(default if low is None else low), float(default if high is None else high))
        self._on_policy = on_policy
        self._measuring = True
        self._gaps: MismatchSums | None = None
        self._seconds = 0.0

    def measure_in_driver(self, batch: Any, metrics: MutableMapping[str, Any]) -> None:
        """In decoupled mode, measure what verl has computed already; in bypass mode there is nothing yet."""
        if not self.bypass:
            self._guarded(lambda: self._measure_in_driver(batch, metrics))

    def _measure_in_driver(self, batch: Any, metrics: MutableMapping[str, Any]) -> None:
        import transfer_queue as tq

        kept = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = ["old_log_probs", "rollout_log_probs", "response_mask", "advantages"]
        data = tq.kv_batch_get(keys=kept, partition_id=batch.partition_id, select_fields=fields)
        padded = data.to_padded_tensor()
        trainer, rollout, mask, advantages = (padded[name] for name in fields)
        self._gaps = MismatchSums(ratio_threshold=self.settings.ratio_threshold)
        self._gaps.update(trainer, rollout, mask, advantages)
        metrics.update(self._gaps.metrics())
        if self._on_policy and not self.shadowed:
            # Same weights on both sides, so that the whole gap is beta, and mu stands for the shadow.
            phantom = PhantomSums(*self.clip)
            phantom.update(trainer, rollout, rollout, mask, advantages)
            metrics.update(phantom.metrics())

    def ask_the_worker(self, batch: Any) -> None:
        """Have the next update measured where the driver cannot."""
        if self._measuring and (self.bypass or self.shadowed):
            low, high = self.clip
            batch.extra_info[REQUEST] = request(
                mismatch=self.bypass,
                bypass=self.bypass,
                clip_low=low,
                clip_high=high,
                ratio_threshold=self.settings.ratio_threshold,
            )

    def take_from_the_worker(self, metrics: MutableMapping[str, Any]) -> None:
        """Turn the sums that came back into metrics, and give this package's metrics their own names."""
        for key in (MISMATCH, PHANTOM):
            sums = metrics.pop(ACTOR + key, None)
            if sums is not None:
                metrics.update(sums.metrics())
                self._gaps = sums if isinstance(sums, MismatchSums) else self._gaps
        for key in [key for key in metrics if key.startswith(tuple(ACTOR + ours for ours in OURS))]:
            metrics[key.removeprefix(ACTOR)] = metrics.pop(key)

    def judge(self, step: int, metrics: MutableMapping[str, Any]) -> MismatchAlarmError | None:
        """Feed the alarm, say what it raises, and return the error that is to end the run, if one is.

        Args:
            step: of training.
            metrics: of this step; `alarm/active` and `timing_s/mismatch` are added.
        """
        stop = None
        with self._timed():
            try:
                act_on(self.alarm.update(step, metrics), self.settings.alarm, log=logger.warning)
            except MismatchAlarmError as error:
                stop = error
        metrics["alarm/active"] = len(self.alarm.active)
        metrics["timing_s/mismatch"], self._seconds = self._seconds, 0.0
        return stop

    def show_histograms(self, tracking: Any, step: int) -> None:
        """Give the histogram of the gap to the loggers that can show it."""
        gaps, self._gaps = self._gaps, None
        if gaps is not None and self.settings.histograms:
            from verl_precision.integration.histogram_loggers import log_histograms

            self._guarded(lambda: log_histograms(tracking, gaps.histograms(), step))

    def save(self, folder: str) -> None:
        """Write the alarm's memory beside a checkpoint."""
        write_file(Path(folder) / ALARM_FILE, json.dumps(self.alarm.state_dict()), replace=True)

    def load(self, folder: str) -> None:
        """Take over the alarm's memory of a checkpoint, if it has one."""
        path = Path(folder) / ALARM_FILE
        if path.is_file():
            self.alarm.load_state_dict(json.loads(path.read_text()))

    def _guarded(self, measure: Callable[[], None]) -> None:
        """Measure; if that fails, say so, and never measure again in this run, which goes on."""
        if not self._measuring:
            return
        with self._timed():
            try:
                measure()
            except Exception:  # somebody's run is under way, and does not need these numbers
                self._measuring = False
                logger.exception("the mismatch could not be measured; it is left out from now on, training goes on")

    def _timed(self) -> "_Stopwatch":
        return _Stopwatch(self)


class _Stopwatch:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._watch._seconds += time.perf_counter() - self._start
