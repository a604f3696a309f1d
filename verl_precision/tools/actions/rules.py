"""Rules of an alarm that acts, and of a learning rate that follows the effective sample: what each needs of a run."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype
from verl_precision.check.rules.loss import CORRECTION, RATIO_SOURCE, weighs_responses
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.integration.trainer.saving import saves
from verl_precision.mismatch.settings import ON_ALARM, REMEDIES, MismatchSettings

RESCUE = f"Set {ON_ALARM}=rescue."


@rule("alarm-cannot-act")
def alarm_cannot_act(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """An action that would fail, or change nothing, when the alarm begins it: hours after the start."""
    settings = _settings(config)
    act = settings.alarm.on_alarm
    if act not in REMEDIES:
        return
    actor, loss = engines(config)[0], config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
    if not settings.enabled:
        problem = "verl's own trainer measures nothing and has no alarm"
        yield Fault(ON_ALARM, problem, "log, with mismatch.enabled=False", "Set mismatch.enabled=True.")
    if act == "mask":
        yield from _masking(config)
    if act == "lower_learning_rate":
        others = "log, stop, mask or rescue"
        if not actor.our_fsdp:
            problem = f"no engine of this package holds the learning rate of strategy={actor.strategy}"
            remedy = f"Set {ON_ALARM}=rescue, or choose a precision preset."
            yield Fault(ON_ALARM, problem, f"{others}; or a precision preset with fsdp or fsdp2", remedy)
        if not weighs_responses(config):
            problem = f"loss_mode={loss} has no importance weights here, and so no effective sample size"
            remedy = f"Set {ON_ALARM}=rescue, or choose estimator=pg_seq_is."
            yield Fault(ON_ALARM, problem, f"{others}; or a loss with weights", remedy)
    if act == "rescue":
        if actor.strategy not in FSDP:
            problem = f"a rescue goes on from a checkpoint, and those of strategy={actor.strategy} are not read here"
            yield Fault(ON_ALARM, problem, "log or stop, or the strategy fsdp or fsdp2", f"Set {ON_ALARM}=stop.")
        exact = OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT
        if exact or (actor.compute, rollout_dtype(config)) == ("fp16", "fp16"):
            problem = "the run has no larger gap than in FP16, in which a rescue would go on"
            yield Fault(ON_ALARM, problem, "log or stop", f"Set {ON_ALARM}=stop.")


def _masking(config: DictConfig) -> Iterator[Fault]:
    correction, shadow = OmegaConf.select(config, CORRECTION), OmegaConf.select(config, RATIO_SOURCE) == "shadow"
    others = "log, stop or rescue"
    if correction is None or correction.bypass_mode or shadow:
        problem = "the mask is verl's rejection, which needs old log-probs of the training forward: bypass mode, "
        allowed = f"{others}; or decoupled mode with ratio_source=training"
        yield Fault(ON_ALARM, f"{problem}ratio_source=shadow and rollout_correction=null have none", allowed, RESCUE)
    if correction is not None and correction.rollout_rs is not None:
        problem = f"the mask is verl's rejection of responses, which {CORRECTION}.rollout_rs has at every step"
        remedy = f"Set {CORRECTION}.rollout_rs=null, or {ON_ALARM}=rescue."
        yield Fault(ON_ALARM, problem, f"{others}; or rollout_rs=null", remedy)


@rule("rescue-from-start", "warning")
def rescue_from_start(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Without a checkpoint from before the trouble a rescue begins anew."""
    if _settings(config).alarm.on_alarm == "rescue" and not saves(config):
        remedy = "Set trainer.save_freq or checkpoint.every_minutes."
        yield Fault(ON_ALARM, "the run saves no checkpoints: a rescue begins from step 1", "a run that saves", remedy)


@rule("engine-settings")
def learning_rate_without_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The effective sample size that scales the rate is one of importance weights, which a loss has or is given."""
    setting = "actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base"
    if OmegaConf.select(config, setting) is not None and not weighs_responses(config):
        loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
        problem = f"loss_mode={loss} has no importance weights here, and so no effective sample size"
        remedy = "Choose estimator=pg_seq_is, or leave out the preset learning_rate."
        yield Fault(setting, problem, "null, or a loss with weights", remedy)


def _settings(config: DictConfig) -> MismatchSettings:
    try:
        return MismatchSettings.from_config(config)
    except ConfigurationError:  # another rule refuses it
        return MismatchSettings()
