"""verl's mains with a trainer of their own: what of this package acts there; settings that another main reads.

Run on a CPU with verl 0.9.1: docs/versions.md, Mains.
"""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import is_repeatable, other_trainer
from verl_precision.check.keys import legacy
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule
from verl_precision.integration.trainer.saving import every_minutes

WITHOUT_PARTS = "main-without-parts"
_INSTEAD = "Start verl.trainer.main_ppo, with trainer.v1.trainer_mode=separate_async where the rollout has its own GPUs"


@rule(WITHOUT_PARTS, "warning")
def parts_of_a_main(config: DictConfig, environment: Environment) -> Faults:
    """The seams for trainers are those of verl's V1 trainer: without it nothing measures, or asks the canary."""
    main = other_trainer(config)
    if main is None or not OmegaConf.select(config, "mismatch.enabled"):  # no preset is chosen
        return
    yield Fault(
        setting="mismatch.enabled", allowed="verl's V1 trainer",
        problem=f"{main} has another trainer. There act: precision and loss scale with their metrics, the loss, this "
        "check, and the layers of a weight sync. There do not: metrics and alarm of the mismatch, kept tokens, the "
        "canary, checkpoints by time or signal",
        remedy=f"{_instead(main)} for all of them; mismatch.enabled=False says that it is meant so.",
    )  # fmt: skip


@rule("main-lacks-part")
def asked_of_a_main(config: DictConfig, environment: Environment) -> Faults:
    """What a config asks of a trainer that is not started would not come, without a word."""
    if (main := other_trainer(config)) is None:
        return
    asked = {
        "mismatch.alarm.on_alarm": OmegaConf.select(config, "mismatch.alarm.on_alarm", default="log") != "log",
        "checkpoint.every_minutes": every_minutes(config) > 0 and (config.trainer.save_freq or 0) <= 0,
        "actor_rollout_ref.rollout.custom.seeded": is_repeatable(config),
        "actor_rollout_ref.rollout.custom.sampling_masks": bool(
            OmegaConf.select(config, "actor_rollout_ref.rollout.custom.sampling_masks")
        ),
        "actor_rollout_ref.actor.fsdp_config.router_replay.mode": main != "trainer.use_v1=False"
        and OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.router_replay.mode") in ("R2", "R3"),
    }
    for setting, is_asked in asked.items():
        if is_asked:
            problem = f"the trainer of {main} does not do it"
            remedy = f"{_instead(main)}, or leave the setting out."
            yield Fault(setting=setting, problem=problem, allowed="verl's V1 trainer", remedy=remedy)


def _instead(main: str) -> str:
    return "Set trainer.use_v1=True" if main.startswith("trainer.") else _INSTEAD


@rule("setting-moved")
def legacy_rewards(config: DictConfig, environment: Environment) -> Faults:
    """verl has kept these blocks, and its main_ppo reads another: a reward function there is silently not used."""
    yield from legacy(config)
