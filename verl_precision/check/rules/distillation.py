"""Rules of on-policy distillation: what makes a signal of a teacher that has the student's own weights."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import ROLLOUT, engines, teaches
from verl_precision.check.models import served_models
from verl_precision.check.rules.rule import Environment, Fault, rule


@rule("teacher-precision", "warning")
def teacher_precision(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A teacher in another dtype than the trainer's: a teacher by another name than verl's own stays in BF16."""
    actor = engines(config)[0].compute
    for served in served_models(config):
        if served.role.startswith("teacher") and served.dtype not in (actor, "auto"):
            yield Fault.worded("teacher-precision", f"{served.setting}.dtype", served=served, actor=actor)


@rule("teacher-temperature", "warning")
def teacher_temperature(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl asks for a teacher's log-probs of a prompt, which have no temperature; the student's logits have one."""
    temperature = OmegaConf.select(config, f"{ROLLOUT}.temperature")
    if teaches(config) and temperature != 1:
        yield Fault.worded("teacher-temperature", f"{ROLLOUT}.temperature", temperature=temperature)
