"""Rules of an alarm that acts: what each action needs of trainer, estimator and checkpoints."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype
from verl_precision.check.rules.loss import RATIO_SOURCE, weighs_responses
from verl_precision.check.rules.rule import Environment, Faults, rule, told, told_where
from verl_precision.engine.arithmetic_choice import IN_CONFIG
from verl_precision.integration.trainer.saving import saves
from verl_precision.mismatch.settings import REMEDIES, MismatchSettings, settings_of


@rule("alarm-cannot-act")
def alarm_cannot_act(config: DictConfig, environment: Environment) -> Faults:
    """An action that would fail, or change nothing, when the alarm begins it: hours after the start."""
    if (settings := _acting(config)) is None:
        return
    actor, exact = engines(config)[0], OmegaConf.select(config, IN_CONFIG) == EXACT
    ours, on_cpu = actor.strategy in FSDP and actor.ours, config.trainer.device == "cpu"
    kind, to_fp16 = settings.alarm.on_alarm, settings.alarm.rescue_precision == "fp16"
    lowers, masks, rescues = (kind == each for each in REMEDIES)
    correction, shadow = (OmegaConf.select(config, key) for key in ("algorithm.rollout_correction", RATIO_SOURCE))
    in_fp16 = actor.compute == "fp16" and rollout_dtype(config) == "fp16"
    wrong = {
        "trainer": not settings.enabled,
        "engine": lowers and not ours,
        "weights": lowers and not weighs_responses(config),
        "log-probs": masks and (correction is None or correction.bypass_mode or shadow == "shadow"),
        "rejection": masks and correction is not None and correction.rollout_rs is not None,
        "checkpoints": rescues and actor.strategy not in FSDP,
        "precision": rescues and (in_fp16 and to_fp16 or exact),
        "exact": rescues and not to_fp16 and not on_cpu,
    }
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
    yield from told_where("alarm-cannot-act", wrong, loss=loss, strategy=actor.strategy)


@rule("rescue-from-start", "warning")
def rescue_from_start(config: DictConfig, environment: Environment) -> Faults:
    """Without a checkpoint from before the trouble a rescue begins anew."""
    settings = _acting(config)
    if settings is not None and settings.alarm.on_alarm == "rescue" and not saves(config):
        yield told("rescue-from-start")


def _acting(config: DictConfig) -> MismatchSettings | None:
    try:
        settings = settings_of(config)
    except ConfigurationError:  # another rule refuses it
        return None
    return None if settings.alarm.on_alarm in ("log", "stop") else settings
