"""Rules for `on_alarm=rescue` and for a learning rate that follows the effective sample size."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.verl_config import FSDP, engines, rollout_dtype
from verl_precision.check.rules.loss import weighs_responses
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.mismatch.settings import ON_ALARM, MismatchSettings


@rule("alarm-cannot-act")
def alarm_cannot_act(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A rescue that would fail or change nothing, which would show only hours after the start of the run."""
    settings, actor = _settings(config), engines(config)[0]
    if settings.alarm.on_alarm != "rescue":
        return
    if not settings.enabled:
        problem = "verl's own trainer does not measure the mismatch and has no alarm"
        yield Fault(ON_ALARM, problem, "log, with mismatch.enabled=False", "Set mismatch.enabled=True.")
    if actor.strategy not in FSDP:
        problem = f"a rescue resumes from a checkpoint, but cannot read those of strategy={actor.strategy}"
        yield Fault(ON_ALARM, problem, "log or stop, or the strategy fsdp or fsdp2", f"Set {ON_ALARM}=stop.")
    exact = OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT
    if exact or (actor.compute, rollout_dtype(config)) == ("fp16", "fp16"):
        problem = "a rescue would resume in FP16, but this run's gap is no larger than in FP16"
        yield Fault(ON_ALARM, problem, "log or stop", f"Set {ON_ALARM}=stop.")


@rule("engine-settings")
def learning_rate_without_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The learning rate follows the effective sample size, which only a loss with importance weights has."""
    setting = "actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base"
    if OmegaConf.select(config, setting) is not None and not weighs_responses(config):
        loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode")
        problem = f"loss_mode={loss} has no importance weights here, so it has no effective sample size"
        remedy = "Choose estimator=pg_seq_is, or leave out the preset learning_rate."
        yield Fault(setting, problem, "null, or a loss with weights", remedy)


def _settings(config: DictConfig) -> MismatchSettings:
    try:
        return MismatchSettings.from_config(config)
    except ConfigurationError:  # another rule reports it
        return MismatchSettings()
