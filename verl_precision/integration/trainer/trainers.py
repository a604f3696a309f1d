"""verl's V1 trainers with callbacks of this package: `vp_sync`, `vp_colocate_async`, `vp_separate_async`.

A callback has one task in a run: measuring, saving, the canary, or the action of an alarm. Its methods have verl's
names, some of `HOOKS`. The first argument of each is `proceed`, which calls the next callback, or in the innermost one
verl's method; verl's arguments follow. Callbacks that most runs do not need are found by entry points.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.extensions import features_asked_for
from verl_precision.base.verl_config import MODES, PREFIX, is_repeatable, missing_log_probs, trainer_to_start
from verl_precision.integration.ledger import is_lost
from verl_precision.integration.trainer.checkpoints import RESCUE_FILE
from verl_precision.integration.trainer.run_monitor import RunMonitor
from verl_precision.integration.trainer.saving import Saving, checkpoint_settings
from verl_precision.mismatch.settings import ON_ALARM, MismatchSettings
from verl_precision.weight_sync.settings import canary_settings

HOOKS = (
    *("fit", "on_init_end", "on_sample_end", "on_step_end", "_compute_advantage", "_update_actor", "_compute_metrics"),
    *("_save_checkpoint", "_load_checkpoint"),
)
_PROMISED = ("mismatch.keep_tokens", "mismatch.prometheus", "mismatch.alarm.notify", f"{ON_ALARM}:rescue")
# verl checks every 2 seconds whether all responses are there; a tiny model samples them in less time.
_POLL_SECONDS_ON_CPU = 0.1


def measured_mode(config: DictConfig) -> str | None:
    """Return the name of the measuring trainer that replaces a config's trainer, or None if none does."""
    MismatchSettings.from_config(config)
    measured = trainer_to_start(config)
    if measured == str(OmegaConf.select(config, "trainer.v1.trainer_mode")):
        return None
    _require_rollout_log_probs(config)
    canary_settings(config)
    checkpoint_settings(config)
    callbacks_asked_for(config)
    return measured


def _require_rollout_log_probs(config: DictConfig) -> None:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise missing_log_probs("mismatch.enabled=True needs the rollout's log-probs")


def callbacks_asked_for(config: DictConfig) -> list[Callable[[Any], object]]:
    """Return the classes of the callbacks that a config turns on; in a rescue's folder the rescue is on."""
    folder = Path(OmegaConf.select(config, "trainer.default_local_dir") or ".")
    known = {ON_ALARM: "rescue"} if (folder / RESCUE_FILE).exists() else {}
    return features_asked_for("trainer", lambda name: known.get(name, OmegaConf.select(config, name)), _PROMISED)


def register_trainers(v1: ModuleType) -> None:
    """Register a measuring variant of each of verl's V1 trainers, once."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for mode in MODES:
        if PREFIX + mode not in TRAINER_REGISTRY and not is_lost(PREFIX + mode):
            v1.register_trainer(PREFIX + mode)(_measuring(TRAINER_REGISTRY[mode], mode))


def _measuring(base: type, mode: str) -> type:
    # Not above: these import verl's trainers, whose import needs this module.
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_precision.integration.trainer.batch_checks import BatchChecks
    from verl_precision.integration.trainer.canary_requests import TrainerCanary

    class MeasuringTrainer(base):  # type: ignore[misc, valid-type]
        __doc__ = f"{base.__name__} with callbacks of this package; see {__name__}."

        def __init__(self, config):
            _require_rollout_log_probs(config)
            # verl chooses buffers and settings by the mode's name, so the config gets verl's name.
            config.trainer.v1.trainer_mode = mode
            self.config = config
            self.monitor = RunMonitor(self)
            asked_for = [callback(self) for callback in callbacks_asked_for(config)]
            # The first callback is the outermost.
            self.callbacks = [Saving(self), *asked_for, self.monitor, BatchChecks(self), TrainerCanary(self)]
            super().__init__(config)
            if is_repeatable(config):
                from verl_precision.integration.trainer.repeatable import name_prompts

                name_prompts(self)
            if mode == "sync" and config.trainer.device == "cpu" and isinstance(self.replay_buffer, ReplayBuffer):
                self.replay_buffer.poll_interval = _POLL_SECONDS_ON_CPU

    MeasuringTrainer.__name__ = MeasuringTrainer.__qualname__ = f"Measuring{base.__name__}"
    for name in HOOKS:
        setattr(MeasuringTrainer, name, _through_callbacks(base, name))
    return MeasuringTrainer


def _through_callbacks(base: type, name: str) -> Callable[..., Any]:
    """Return a trainer's method that calls the callbacks, and verl's method innermost."""

    def hook(self, *args, **kwargs):
        proceed = partial(getattr(base, name), self)
        for callback in reversed(self.callbacks):
            if method := getattr(callback, name, None):
                proceed = partial(method, proceed)
        return proceed(*args, **kwargs)

    hook.__name__, hook.__qualname__ = name, f"MeasuringTrainer.{name}"
    return hook
