"""verl's V1 trainers with the mismatch among their metrics: `vp_sync`, `vp_colocate_async`, `vp_separate_async`.

In decoupled mode verl has recomputed the trainer's log-probs already, so that the driver measures without an extra
forward. In bypass mode there are none before the update: the worker measures in its first one (`measurement.py`), as it
does wherever a shadow splits the gap. Chosen by `mismatch.enabled`, which every preset of this package sets.
"""

import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import MODES, PREFIX, is_repeatable, missing_log_probs, trainer_to_start
from verl_precision.integration.ledger import is_lost
from verl_precision.integration.trainer import kept_files
from verl_precision.integration.trainer.found_checkpoints import LAST_FILE, QUEUE
from verl_precision.integration.trainer.merged_metrics import statistics_kept
from verl_precision.integration.trainer.run_monitor import RunMonitor
from verl_precision.integration.trainer.saving import SavePlan, checkpoint_settings
from verl_precision.integration.trainer.session_advantages import advantages_by_session
from verl_precision.mismatch.settings import settings_of
from verl_precision.tools.actions import rescue
from verl_precision.weight_sync.settings import canary_settings

# verl looks every 2 seconds whether all responses are there, which is longer than a tiny model takes to draw them.
_POLL_SECONDS_ON_CPU = 0.1


def measured_mode(config: DictConfig) -> str | None:
    """Return the measuring trainer's name for the trainer a config asks for, or None where nothing is to change.

    Refuses a block `mismatch`, `weight_sync.canary` or `checkpoint` that cannot be used, and a rollout that keeps its
    log-probs.
    """
    settings_of(config)
    measured = trainer_to_start(config)
    if measured == str(OmegaConf.select(config, "trainer.v1.trainer_mode")):
        return None
    _require_rollout_log_probs(config)
    canary_settings(config)
    checkpoint_settings(config)
    return measured


def _require_rollout_log_probs(config: DictConfig) -> None:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise missing_log_probs("mismatch.enabled=True needs the rollout's log-probs")


def register_trainers(v1: ModuleType) -> None:
    """Register a measuring variant of each of verl's V1 trainers, once."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for mode in MODES:
        if PREFIX + mode not in TRAINER_REGISTRY and not is_lost(PREFIX + mode):
            v1.register_trainer(PREFIX + mode)(_measuring(TRAINER_REGISTRY[mode], mode))


def _measuring(base: type, mode: str) -> type:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_precision.integration.trainer.canary_requests import TrainerCanary

    class MeasuringTrainer(base):  # type: ignore[misc, valid-type]
        __doc__ = f"{base.__name__} that reports the training-inference mismatch at every step; see {__name__}."

        def __init__(self, config):
            _require_rollout_log_probs(config)
            self._monitor = RunMonitor(config, settings_of(config))
            self._canary = TrainerCanary(config, canary_settings(config))
            self._canary_metrics: dict[str, float] = {}
            self._known: dict[str, Any] = {}  # metrics of the step, before verl completes them
            self._plan = SavePlan(config)
            self._saved_step: int | None = None
            # verl chooses buffers and settings by the mode's name: to it, this is its own mode.
            config.trainer.v1.trainer_mode = mode
            super().__init__(config)
            if is_repeatable(config):
                # Not above: it imports verl's trainers, whose import wants this module.
                from verl_precision.integration.trainer.repeatable import name_prompts

                name_prompts(self)
            if mode == "sync" and config.trainer.device == "cpu" and isinstance(self.replay_buffer, ReplayBuffer):
                self.replay_buffer.poll_interval = _POLL_SECONDS_ON_CPU

        def fit(self, agent_loop_manager):
            if self._plan.asked_to_end():  # while verl was loading: nothing was learned yet
                return
            self._plan.saved()
            if self._monitor.recorder is not None:
                self._monitor.recorder.begin(self.global_steps)
            with kept_files.series_goes_on(self.global_steps):  # of the checkpoint, which is loaded
                super().fit(agent_loop_manager)
            kept_files.forget_row(self.logger)

        def on_init_end(self, *args, **kwargs):
            super().on_init_end(*args, **kwargs)
            self._canary.ask(_synced_replicas(self), self.tokenizer)

        def on_step_end(self):
            # At this point verl has saved, if `save_freq` says so. After the last step it ends by itself.
            last = self.global_steps >= self.total_training_steps
            ends = not last and self._plan.asked_to_end()
            if (self._plan.due(last) or ends) and self._saved_step != self.global_steps:
                start = time.perf_counter()
                self._save_checkpoint()
                self.timing_raw["save_checkpoint"] = time.perf_counter() - start
            if ends:
                self.total_training_steps = self.global_steps  # verl's loop ends once this step is logged
            super().on_step_end()
            self._canary.ask(_synced_replicas(self), self.tokenizer)

        def on_sample_end(self, *args, **kwargs):
            self._canary.collect()
            super().on_sample_end(*args, **kwargs)
            self._canary_metrics.update(self._canary.judge(self.actor_rollout_wg))

        def _compute_advantage(self, batch, metrics):
            with self._monitor.acting.masking(self.config) as masked, advantages_by_session():
                self._monitor.remember_mask(batch, masked)
                batch = super()._compute_advantage(batch, metrics=metrics)
            self._monitor.measure_in_driver(batch, self.global_steps)
            return batch

        def _update_actor(self, batch, metrics):
            self._monitor.ask_the_worker(batch, self.global_steps, self.local_trigger_step)
            with statistics_kept():
                batch = super()._update_actor(batch, metrics=metrics)
            self._monitor.take_from_the_worker(metrics)
            self._known = metrics
            return batch

        def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
            super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
            canary, self._canary_metrics = self._canary_metrics, {}
            guard_seconds = metrics.get("weight_sync/seconds", 0.0)
            metrics.update({**canary, "weight_sync/seconds": guard_seconds + canary.get("weight_sync/seconds", 0.0)})
            self._monitor.add_metrics(metrics)
            self._monitor.keep_tokens(batch, global_steps, self.tokenizer)
            stop = self._monitor.judge(global_steps, metrics)
            if self._monitor.first_alarm_step is not None:
                folder = Path(self.config.trainer.default_local_dir)
                kept_files.keep_checkpoint_before(self._monitor.first_alarm_step, folder)
            if (action := self._monitor.acting.begun) is not None and action.kind == "rescue":
                rescue.decide(self.config, action)
                self.total_training_steps = global_steps  # verl's loop ends once this step is logged
            if self._saved_step == global_steps:
                self._monitor.save(_checkpoint_folder(self), metrics)
            self._monitor.show(self.logger, global_steps)
            if stop is not None:
                self.logger.log(data=metrics, step=global_steps)
                if self._saved_step != global_steps:  # saved twice, verl counts it twice, and removes it with keep=1
                    if mode == "sync":  # vLLM is awake already, for the next step; saving needs the memory
                        self.checkpoint_manager.sleep_replicas()
                    self._save_checkpoint()
                raise stop

        def _save_checkpoint(self):
            row = {**self._known, **self._monitor.measured()}
            kept_files.remember_row(self.logger, self.global_steps, row)
            # An earlier start may have saved this step: until verl has written all of it anew, it is not complete.
            Path(_checkpoint_folder(self), LAST_FILE).unlink(missing_ok=True)
            if (queue := Path(_checkpoint_folder(self), QUEUE)).is_dir():
                shutil.rmtree(queue)
            super()._save_checkpoint()
            self._monitor.save(_checkpoint_folder(self), row)
            self._plan.saved()
            self._saved_step = self.global_steps  # verl saves before the alarm has judged the step

        def _load_checkpoint(self):
            result = super()._load_checkpoint()
            if self.global_steps:  # 0: from scratch
                self._monitor.load(_checkpoint_folder(self, resumed=True))
            return result

    MeasuringTrainer.__name__ = MeasuringTrainer.__qualname__ = f"Measuring{base.__name__}"
    return MeasuringTrainer


def _synced_replicas(trainer: Any) -> list[Any]:
    """Return the replicas that each step's sync reaches; separate_async has its own beside the colocated ones."""
    return getattr(trainer, "standalone_checkpoint_manager", trainer.checkpoint_manager).replicas


def _checkpoint_folder(trainer: Any, resumed: bool = False) -> str:
    settings = trainer.config.trainer
    if resumed and settings.resume_mode == "resume_path":
        return settings.resume_from_path
    return f"{settings.default_local_dir}/global_step_{trainer.global_steps}"
