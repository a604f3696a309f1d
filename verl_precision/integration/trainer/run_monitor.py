"""The trainer callback that measures the mismatch, updates the alarm, and saves its state (`trainers.py`).

In decoupled mode verl has recomputed the trainer's log-probs, and the driver measures. In bypass mode, and wherever a
shadow splits the gap, the worker measures in an update (`measurement.py`).
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, MutableMapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from verl_precision.base.files import write_file
from verl_precision.base.loggers import mismatch as logger
from verl_precision.base.mergeable import Count, Mean, Statistic, merge_by_name
from verl_precision.base.state import read_state
from verl_precision.base.verl_config import engine_kwargs, engines, rollout_dtype, teaches
from verl_precision.integration.engine import measurement
from verl_precision.integration.engine.measurement import CANDIDATES
from verl_precision.integration.trainer.merged_metrics import statistics_kept
from verl_precision.integration.trainer.session_advantages import advantages_by_session
from verl_precision.losses.registry import ratio_of
from verl_precision.losses.settings import Ratio, clip_range
from verl_precision.mismatch import metric_names as names
from verl_precision.mismatch.alarm import Alarm, act_on, remedies_in_use
from verl_precision.mismatch.candidates import Candidates, lot_of
from verl_precision.mismatch.groups import beta_of_current_version
from verl_precision.mismatch.monitor import DISTILLATION, MISMATCH, PHANTOM, TURNS, MismatchMonitor
from verl_precision.mismatch.packing import flattened
from verl_precision.mismatch.prediction import prediction_in_words, weighting_of
from verl_precision.mismatch.settings import MismatchSettings

ALARM_FILE, STEP_METRICS = "mismatch_alarm.json", "step_metrics.json"
# The worker reports metrics with these prefixes; verl puts `actor/` before them, which is removed here.
METRIC_PREFIXES = ("mismatch/", "phantom/", "precision/", "weight_sync/")


class RunMonitor:
    """Measures, updates the alarm and saves its state for one run; statistics become numbers at the end of a step."""

    def __init__(self, trainer: Any) -> None:
        """Read from a trainer's config what to measure, and where."""
        self._trainer, self._config = trainer, (config := trainer.config)
        self.settings = settings = MismatchSettings.from_config(config)
        correction = OmegaConf.select(config, "algorithm.rollout_correction") or {}
        bypass = bool(correction.get("bypass_mode"))  # verl skips the forward at θ': old log-probs are the rollout's
        actor = config.actor_rollout_ref.actor
        shadow = OmegaConf.select(actor, "fsdp_config.shadow") or {}
        beta_in_ratio = shadow.get("ratio_source") != "shadow"  # the loss sees the training forward's log-probs
        self.shadowed = not beta_in_ratio or (shadow.get("every_n_steps") or 0) > 0
        self.in_worker = bypass or not beta_in_ratio  # the driver never sees the trainer's log-probs
        ratio = ratio_of(actor)
        self.request = measurement.MeasureOrder(
            mismatch=self.in_worker,
            rollout_as_shadow=self.in_worker and not self.shadowed,
            bypass=bypass,
            clip=clip_range(ratio, actor) if ratio is not None and bypass else None,
            beta_in_ratio=beta_in_ratio,
            longest_response=int(config.actor_rollout_ref.rollout.response_length),
            keep=settings.keep_tokens,
            distillation=teaches(config),
        )
        self.mismatch = MismatchMonitor(settings.alarm, in_use=_in_use(config, ratio, correction), gather=False)
        self.alarm = self.mismatch.alarm
        self.add = self.mismatch.add  # a set of statistics, which merges with those of the step's earlier updates
        self.raised: list[Alarm] = []  # by the latest step
        self.first_alarm_step: int | None = None  # first step of evidence of the latest step's alarms
        self.candidates = Candidates(settings.keep_tokens)  # responses of the step whose tokens may be kept
        self.masks: dict[str, Tensor] = {}  # verl's key of a response -> its mask before verl's rejection
        self._mask: Any = None
        self._losses: dict[str, Statistic] = {}
        self._seconds, self._failures, self._predicted = 0.0, 0, False

    def fit(self, proceed, *args, **more):
        """Run the training loop, and log the verdict on the steps of this start, however it ends."""
        try:
            return proceed(*args, **more)
        finally:
            logger.warning("VERDICT %s", self.mismatch.judge.verdict())

    def _compute_advantage(self, proceed, batch, metrics):
        self.remember_mask(batch)
        with advantages_by_session():
            batch = proceed(batch, metrics=metrics)
        self.measure_in_driver(batch, self._trainer.global_steps)
        return batch

    def _update_actor(self, proceed, batch, metrics):
        self.ask_the_worker(batch, self._trainer.global_steps, self._trainer.local_trigger_step)
        with statistics_kept():
            batch = proceed(batch, metrics=metrics)
        self.take_from_the_worker(metrics)
        return batch

    def _compute_metrics(self, proceed: Any, batch: Any, metrics: Any, *args: Any, **more: Any) -> None:
        proceed(batch, metrics, *args, **more)
        self.add_metrics(metrics)
        self.judge(more["global_steps"], metrics)

    def remember_mask(self, batch: Any) -> None:
        """Keep the mask from before verl's rejection (`rollout_rs`), which removes rejected tokens from the mask."""
        correction = OmegaConf.select(self._config, "algorithm.rollout_correction") or {}
        if correction.get("rollout_rs") and not correction.get("bypass_mode"):
            with self.guarded():
                (self._mask,) = fetch(batch, "response_mask")
                if self.settings.keep_tokens:
                    self.masks |= dict(zip(real_rows(batch)[0], self._mask.bool().unbind(), strict=True))

    def measure_in_driver(self, batch: Any, step: int) -> None:
        """Measure if verl has computed the log-probs already; responses of the version before `step` are current."""
        if self._mask is not None:
            with self.guarded():
                self._count_rejected(*fetch(batch, "response_mask"))
        if self.in_worker:
            self._mask = None
            return
        with self.guarded():
            fields = ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
            trainer, rollout, mask, advantages = fetch(batch, *fields)
            mask, self._mask = mask if self._mask is None else self._mask, None
            keys, tags = real_rows(batch)
            behind = _versions_behind(tags, step)
            ended = measurement.ended_by_themselves(mask, self.request["longest_response"])
            flat = flattened(trainer, rollout, mask=mask, advantages=advantages, ended=ended)
            self.mismatch.add_batch(flat, behind)
            if keep := self.settings.keep_tokens:
                lots = [lot_of(step, key) for key in keys]
                self.candidates = self.candidates.merge(Candidates.of_batch(keep, lots, flat))
            if not self.shadowed:
                # The old log-probs are the trainer's own: their rounding cancels in the ratio, and clips no token.
                self.add(PHANTOM, beta_of_current_version(flat, behind, None))

    def _count_rejected(self, left: Any) -> None:
        """Count the tokens and responses that verl's rejection has removed from the mask, and so from the loss."""
        rows = [(before.bool(), after.bool()) for before, after in zip(self._mask.unbind(), left.unbind(), strict=True)]
        # [4]: responses before and after, tokens before and after
        counts = torch.tensor([[a.any(), b.any(), a.sum(), b.sum()] for a, b in rows], dtype=torch.float64).sum(dim=0)
        found = {
            names.REJECTED_RESPONSES: Count(counts[0] - counts[1]),
            names.KEPT_RESPONSES: Mean(counts[1], counts[0]),
            names.KEPT_TOKENS: Mean(counts[3], counts[2]),
        }
        self._losses = merge_by_name([self._losses, found])

    def ask_the_worker(self, batch: Any, step: int, updates: int) -> None:
        """Request a measurement of the next update if needed; after other `updates` no response is current."""
        if not (self.in_worker or self.shadowed or self.request["distillation"]):
            return
        batch.extra_info[measurement.REQUEST] = self.request
        behind = _versions_behind(batch.tags, step + bool(updates))
        if self.in_worker and any(behind):
            with self.guarded():
                put(batch, measurement.VERSIONS_BEHIND, torch.tensor(behind).unsqueeze(-1))
        if self.in_worker and self.settings.keep_tokens:
            with self.guarded():
                pairs = zip(batch.keys, batch.tags, strict=True)
                lots = [-1 if tag.get("is_padding", False) else lot_of(step, key) for key, tag in pairs]
                put(batch, measurement.LOTS, torch.tensor(lots).unsqueeze(-1))

    def take_from_the_worker(self, metrics: MutableMapping[str, Any]) -> None:
        """Take an update's statistics (`merged_metrics.statistics_kept`), and give our metrics their own names."""
        for key in (MISMATCH, PHANTOM, TURNS, DISTILLATION):
            if names.ACTOR + key in metrics:
                self.add(key, metrics.pop(names.ACTOR + key))
        if names.ACTOR + CANDIDATES in metrics:
            self.candidates = self.candidates.merge(metrics.pop(names.ACTOR + CANDIDATES))
        for key in [key for key in metrics if key.startswith(tuple(names.ACTOR + ours for ours in METRIC_PREFIXES))]:
            metrics[key.removeprefix(names.ACTOR)] = metrics.pop(key)
        found = [key for key, value in metrics.items() if isinstance(value, Statistic)]
        self._losses = merge_by_name([self._losses, {key: metrics.pop(key) for key in found}])

    def add_metrics(self, metrics: MutableMapping[str, Any]) -> None:
        """Add the measurements of all updates of a step to its metrics, without undefined ones."""
        numbers = {key: statistic.value() for key, statistic in self._losses.items()}
        failed = self._failures + int(numbers.pop(names.ACTOR + measurement.FAILED, 0))
        metrics.update({key: value for key, value in numbers.items() if not math.isnan(value)})
        metrics.update(self.mismatch.take_metrics())
        metrics[names.FAILED_MEASUREMENTS] = failed
        self._losses, self._failures = {}, 0

    def take_candidates(self) -> tuple[Candidates, dict[str, Tensor]]:
        """Return the step's candidates, and the masks of its responses; reset both."""
        found, self.candidates, self.masks = (self.candidates, self.masks), Candidates(self.settings.keep_tokens), {}
        return found

    def judge(self, step: int, metrics: MutableMapping[str, Any]) -> None:
        """Update the alarm and log what it raises; raise `MismatchAlarmError` if that should end the run."""
        start = time.perf_counter()
        if not self._predicted and 0 < (k3 := names.of_current_version(metrics, names.K3_KL) or 0.0) < math.inf:
            self._predicted = True
            with self.guarded():
                logger.info("%s", prediction_in_words(k3, self.request["longest_response"], weighting_of(self._config)))
        raised = self.raised = self.mismatch.judge.update(step, metrics)
        self.first_alarm_step = min((alarm.since_step for alarm in raised), default=None)
        metrics[names.ACTIVE_ALARMS] = len(self.alarm.active)
        metrics["timing_s/mismatch"], self._seconds = self._seconds + time.perf_counter() - start, 0.0
        act_on(raised, self.settings.alarm, log=logger.warning)

    def save(self, folder: Path, metrics: Mapping[str, Any]) -> None:
        """Write the alarm's state beside a checkpoint, and the finite metrics of its step, for the model card."""
        write_file(folder / ALARM_FILE, json.dumps(self.alarm.state_dict()), replace=True)
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, Real)}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        write_file(folder / STEP_METRICS, json.dumps(finite), replace=True)

    def load(self, folder: Path) -> None:
        """Load the alarm's state from a checkpoint, if it has one."""
        read_state(folder / ALARM_FILE, self._take_over, "Restore the file, or remove it to start with a new baseline.")

    def _take_over(self, state: dict[str, Any]) -> None:
        if unknown := state.keys() - self.alarm.state_dict().keys():
            raise ValueError(f"this version has no {min(unknown)}")
        self.alarm.load_state_dict(state)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Time a measurement; if it fails, log and count it. The run continues."""
        start = time.perf_counter()
        try:
            yield
        except Exception:  # a failed measurement must not end a user's run
            self._failures += 1
            logger.exception("the mismatch of this step could not be measured; training continues with the next step")
        finally:
            self._seconds += time.perf_counter() - start


def _in_use(config: DictConfig, ratio: Ratio | None, correction: Mapping[str, Any]) -> frozenset[str]:
    """Return the remedies for alarms that a config already uses."""
    by_loss = ratio is not None and ratio.level == "sequence" and not ratio.clip
    return remedies_in_use(
        engines(config)[0].compute,
        rollout_dtype(config),
        weighs_sequences=by_loss or correction.get("rollout_is") in ("vp_seq_mis", "sequence"),
        verifies_syncs=str(engine_kwargs(config).get("worker_extension_cls")).startswith("verl_precision."),
    )


def _versions_behind(tags: list[dict[str, Any]], step: int) -> list[int]:
    """Return how many versions of the weights each response is behind, by its first tokens."""
    return [max(step - 1 - tag["min_global_steps"], 0) for tag in tags]


def real_rows(batch: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return keys and tags of the responses that are no padding."""
    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]


def fetch(batch: Any, *fields: str) -> list[Any]:
    """Return fields of a batch as nested tensors: padded, long responses would take gigabytes in the driver."""
    rows = fetch_rows(real_rows(batch)[0], batch.partition_id, *fields)
    return [torch.nested.as_nested_tensor(rows[name], layout=torch.jagged) for name in fields]


def fetch_rows(keys: list[str], partition: str, *fields: str) -> dict[str, list[Tensor]]:
    """Return a dictionary: name of a field -> one tensor for each key."""
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(fields))
    return {name: list(data[name].unbind()) for name in fields}


def put(batch: Any, field: str, values: Tensor) -> None:
    """Add a field to a batch, for the workers."""
    import transfer_queue as tq

    fields = TensorDict({field: values}, batch_size=len(values))
    batch.fields = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields).fields
