"""What the measuring trainer does at each point of a step, without being a trainer: measure, judge and remember."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import MismatchAlarmError
from verl_precision.base.files import write_file
from verl_precision.base.mergeable import Count, Mean, Statistic, merge_by_name
from verl_precision.base.verl_config import engine_kwargs, engines, rollout_dtype
from verl_precision.engine.arithmetic.chosen import IN_CONFIG
from verl_precision.integration.engine import measurement
from verl_precision.integration.engine.measurement import MISMATCH, PHANTOM
from verl_precision.integration.trainer.merged_metrics import log_histograms
from verl_precision.losses.clipping import Ratio, clip_range
from verl_precision.losses.registry import ratio_of
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.alarm import MismatchAlarm, act_on
from verl_precision.mismatch.remedies import remedies_in_use
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.mismatch.staleness import MismatchByVersion, beta_of_current_version
from verl_precision.mismatch.statistics import MismatchStatistics

ALARM_FILE = "mismatch_alarm.json"
# Of these metrics that the worker reports about an update of the actor, verl's prefix is taken off.
METRIC_PREFIXES = ("mismatch/", "phantom/", "precision/", "weight_sync/")

logger = logging.getLogger("verl_precision.mismatch")


class RunMonitor:
    """Measures, judges and remembers for one run.

    What is measured is kept as statistics until the step ends: a step of separate_async has several updates, whose
    numbers verl would combine by their names.
    """

    def __init__(self, config: DictConfig, settings: MismatchSettings) -> None:
        """Read what decides where to measure, and what; `settings` is the config's block `mismatch`."""
        self.settings = settings
        correction = OmegaConf.select(config, "algorithm.rollout_correction") or {}
        bypass = bool(correction.get("bypass_mode"))  # verl skips the forward at θ': old log-probs are the rollout's
        actor = config.actor_rollout_ref.actor
        shadow = OmegaConf.select(actor, "fsdp_config.shadow") or {}
        beta_in_ratio = shadow.get("ratio_source") != "shadow"  # the loss sees the training forward's log-probs
        self.shadowed = not beta_in_ratio or (shadow.get("every_n_steps") or 0) > 0
        self.longest_response = int(config.actor_rollout_ref.rollout.response_length)
        self.in_worker = bypass or not beta_in_ratio  # the driver never sees the trainer's log-probs
        ratio = ratio_of(actor)
        against_rollout = ratio is not None and (ratio.bypass if bypass else ratio.decoupled) == "rollout"
        self.request = measurement.Request(
            mismatch=self.in_worker,
            rollout_as_shadow=self.in_worker and not self.shadowed,
            bypass=bypass,
            clip=clip_range(ratio, actor) if ratio is not None and against_rollout else None,
            beta_in_ratio=beta_in_ratio,
            ratio_threshold=settings.ratio_threshold,
            longest_response=self.longest_response,
        )
        self.alarm = MismatchAlarm(settings.alarm, _in_use(config, ratio, correction))
        # The least share of equal log-probs that exact arithmetic promises; in FP32 an order of sums may show.
        least = 0.98 if engines(config)[0].compute == "fp32" else 1.0
        self._least_equal = least if OmegaConf.select(config, IN_CONFIG) in EXACT else 0.0
        self._rejects = bool(correction.get("rollout_rs")) and not bypass
        self.first_alarm_step: int | None = None  # first step of the evidence of the alarms that the last step raised
        self._mask: Any = None
        self._sets: dict[str, Any] = {}
        self._losses: dict[str, Statistic] = {}
        self._seconds, self._failures = 0.0, 0

    def remember_mask(self, batch: Any) -> None:
        """Keep the mask as it is before verl's rejection (`rollout_rs`), which hides what it rejects from the mask."""
        if self._rejects:
            with self._guarded():
                (self._mask,) = _fetch(batch, "response_mask")

    def measure_in_driver(self, batch: Any, step: int) -> None:
        """Measure what verl has computed already, if it has; responses of the version before `step` are current."""
        if self._mask is not None:
            with self._guarded():
                self._count_rejected(*_fetch(batch, "response_mask"))
        if self.in_worker:
            self._mask = None
            return
        with self._guarded():
            fields = ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
            trainer, rollout, mask, advantages = _fetch(batch, *fields)
            mask, self._mask = mask if self._mask is None else self._mask, None
            behind = _versions_behind(_kept(batch)[1], step)
            threshold = self.settings.ratio_threshold
            ended = measurement.ended_by_themselves(mask, self.longest_response)
            gap = MismatchByVersion.measure(trainer, rollout, mask, advantages, behind, threshold, ended)
            self._add(MISMATCH, gap)
            if not self.shadowed:
                # The old log-probs are the trainer's own: their rounding cancels in the ratio, and cannot clip.
                self._add(PHANTOM, beta_of_current_version(trainer, rollout, mask, advantages, behind, None))

    def _count_rejected(self, left: Any) -> None:
        """Count what verl's rejection has taken out of the mask: the loss sees neither the tokens nor the responses."""
        rows = [(before.bool(), after.bool()) for before, after in zip(self._mask.unbind(), left.unbind(), strict=True)]
        # [4]: responses and tokens before, and of both those that are left
        counts = torch.tensor([[a.any(), b.any(), a.sum(), b.sum()] for a, b in rows], dtype=torch.float64).sum(dim=0)
        found = {
            names.REJECTED_RESPONSES: Count(counts[0] - counts[1]),
            names.KEPT_RESPONSES: Mean(counts[1], counts[0]),
            names.KEPT_TOKENS: Mean(counts[3], counts[2]),
        }
        self._losses = merge_by_name([self._losses, found])

    def ask_the_worker(self, batch: Any, step: int, updates: int) -> None:
        """Have the next update measured where the driver cannot.

        After an update since the last sync (`updates`), no response is of the weights that score it.
        """
        if not (self.in_worker or self.shadowed):
            return
        batch.extra_info[measurement.REQUEST] = self.request
        behind = _versions_behind(batch.tags, step + bool(updates))
        if self.in_worker and any(behind):
            with self._guarded():
                _put(batch, measurement.VERSIONS_BEHIND, torch.tensor(behind).unsqueeze(-1))

    def take_from_the_worker(self, metrics: MutableMapping[str, Any]) -> None:
        """Take an update's statistics (`merged_metrics.statistics_kept`), and give our metrics their own names."""
        for key in (MISMATCH, PHANTOM):
            if names.ACTOR + key in metrics:
                self._add(key, metrics.pop(names.ACTOR + key))
        for key in [key for key in metrics if key.startswith(tuple(names.ACTOR + ours for ours in METRIC_PREFIXES))]:
            metrics[key.removeprefix(names.ACTOR)] = metrics.pop(key)
        found = [key for key, value in metrics.items() if isinstance(value, Statistic)]
        self._losses = merge_by_name([self._losses, {key: metrics.pop(key) for key in found}])

    def measured(self) -> dict[str, float]:
        """Return the metrics of all updates of the step so far; what is undefined on them is absent."""
        numbers = {key: statistic.value() for key, statistic in self._losses.items()}
        failed = self._failures + int(numbers.pop(names.ACTOR + measurement.FAILED, 0))
        found = {key: value for key, value in numbers.items() if not math.isnan(value)}
        for part in self._sets.values():
            found |= part.metrics()
        return {**found, names.FAILED_MEASUREMENTS: failed}

    def add_metrics(self, metrics: MutableMapping[str, Any]) -> None:
        """Add what was measured to the metrics of the step, which ends."""
        metrics.update(self.measured())
        self._losses, self._failures = {}, 0
        mismatch = self._sets.get(MISMATCH)
        current = mismatch.groups.get(0, MismatchStatistics()).metrics() if mismatch is not None else {}
        share = current.get("mismatch/equal_fraction", 1.0)
        if share < self._least_equal:
            self._least_equal = 0.0  # said once
            text = "arithmetic=exact, and only %.2f%% of the log-probs of current responses are equal: one engine "
            text += (
                "rounds otherwise. verl-precision explain --recipe, with the run's overrides, names step and operation."
            )
            logger.warning(text, 100 * share)

    def judge(self, step: int, metrics: MutableMapping[str, Any]) -> MismatchAlarmError | None:
        """Feed the alarm, say what it raises, and return the error that is to end the run, if one is.

        `alarm/active_count` and `timing_s/mismatch` are added to the step's metrics.
        """
        stop, start = None, time.perf_counter()
        raised = self.alarm.update(step, metrics)
        self.first_alarm_step = min((alarm.since_step for alarm in raised), default=None)
        try:
            act_on(raised, self.settings.alarm, log=logger.warning)
        except MismatchAlarmError as error:
            stop = error
        metrics[names.ACTIVE_ALARMS] = len(self.alarm.active)
        metrics["timing_s/mismatch"], self._seconds = self._seconds + time.perf_counter() - start, 0.0
        return stop

    def show_histograms(self, tracking: Any, step: int) -> None:
        """Give the histogram of the gap to the loggers that can show it."""
        mismatch, self._sets = self._sets.get(MISMATCH), {}
        if mismatch is not None and self.settings.histograms:
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

    def _add(self, key: str, found: Any) -> None:
        self._sets = merge_by_name([self._sets, {key: found}])

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time a measurement; if it fails, say so and count it. The run goes on, and the next step tries again."""
        start = time.perf_counter()
        try:
            yield
        except Exception:  # somebody's run is under way, and does not need these numbers
            self._failures += 1
            logger.exception("the mismatch could not be measured; training goes on, and the next step tries again")
        finally:
            self._seconds += time.perf_counter() - start


def _in_use(config: DictConfig, ratio: Ratio | None, correction: Mapping[str, Any]) -> frozenset[str]:
    """Return the remedies against alarms that a config has already."""
    by_loss = ratio is not None and ratio.level == "sequence" and not ratio.clip
    return remedies_in_use(
        engines(config)[0].compute,
        rollout_dtype(config),
        weighs_sequences=by_loss or correction.get("rollout_is") in ("vp_seq_mis", "sequence"),
        verifies_syncs=str(engine_kwargs(config).get("worker_extension_cls")).startswith("verl_precision."),
    )


def _kept(batch: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return keys and tags of the responses that are no padding."""
    kept = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return [batch.keys[row] for row in kept], [batch.tags[row] for row in kept]


def _versions_behind(tags: list[dict[str, Any]], step: int) -> list[int]:
    """Return how many versions of the weights each response is behind; its first tokens decide."""
    return [max(step - 1 - tag["min_global_steps"], 0) for tag in tags]


def _fetch(batch: Any, *fields: str) -> list[Any]:
    """Return fields of a batch, nested: padded, a batch of long responses would take gigabytes in the driver."""
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=_kept(batch)[0], partition_id=batch.partition_id, select_fields=list(fields))
    return [torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged) for name in fields]


def _put(batch: Any, field: str, values: torch.Tensor) -> None:
    """Give the workers one more field of a batch."""
    import transfer_queue as tq

    fields = TensorDict({field: values}, batch_size=len(values))
    batch.fields = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields).fields
