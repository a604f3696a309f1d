"""verl's trainers: what acts in those of other mains, what the V1 trainer does not do, settings of another main.

Other mains were run on a CPU with verl 0.9.1: docs/versions.md, Mains.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import FSDP, ROLLOUT, SEEDED, engines, is_repeatable, lora_rank, other_trainer
from verl_precision.check.keys import legacy
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.integration.trainer.saving import every_minutes

ALARM, MASKS = "mismatch.alarm.on_alarm", f"{ROLLOUT}.custom.sampling_masks"
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
WITHOUT_PARTS = "main-without-parts"
# They need more than `_compute_advantage` of verl 0.9.1 selects: greedy rewards, sums of squares, rewards by parts.
NOT_GIVEN = ("remax", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo")
_INSTEAD = "Start verl.trainer.main_ppo, with trainer.v1.trainer_mode=separate_async where the rollout has its own GPUs"


@rule(WITHOUT_PARTS, "warning")
def parts_of_a_main(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The seams for trainers are those of verl's V1 trainer: without it nothing measures, or asks the canary."""
    main = other_trainer(config)
    if main is None or not OmegaConf.select(config, "mismatch.enabled"):  # no preset is chosen
        return
    problem = (
        f"{main} has another trainer. There act: precision and loss scale with their metrics, the loss, this check and "
        "the layers of a weight sync. There do not: metrics and alarm of the mismatch, kept tokens, the canary, "
        "checkpoints by time or signal"
    )
    remedy = f"{_instead(main)} to use all of them, or set mismatch.enabled=False if you do not need them."
    yield Fault("mismatch.enabled", problem, "verl's V1 trainer", remedy)


@rule("main-lacks-part")
def asked_of_a_main(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """What a config asks of a trainer that is not started would not come, without a word."""
    if (main := other_trainer(config)) is None:
        return
    replayed = OmegaConf.select(config, REPLAY) in ("R2", "R3")
    asked = {
        ALARM: OmegaConf.select(config, ALARM, default="log") != "log",
        "checkpoint.every_minutes": every_minutes(config) > 0 and (config.trainer.save_freq or 0) <= 0,
        SEEDED: is_repeatable(config),
        MASKS: bool(OmegaConf.select(config, MASKS)),
        REPLAY: replayed and main != "trainer.use_v1=False",
    }
    for setting in (setting for setting, is_asked in asked.items() if is_asked):
        remedy = f"{_instead(main)}, or leave the setting out."
        yield Fault(setting, f"the trainer of {main} does not support it", "verl's V1 trainer", remedy)


def _instead(main: str) -> str:
    return "Set trainer.use_v1=True" if main.startswith("trainer.") else _INSTEAD


@rule("advantage-not-computed")
def advantage_not_computed(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """An advantage estimator that needs what the V1 trainer does not give it ends in the first step."""
    name, others = str(config.algorithm.adv_estimator), "grpo, rloo, gae, reinforce_plus_plus, ..."
    if config.trainer.get("use_v1", True) and name in NOT_GIVEN:
        problem = f"verl's V1 trainer does not pass {name} its inputs, so the first step fails"
        yield Fault("algorithm.adv_estimator", problem, others, f"Choose another estimator of advantages: {others}")


@rule("adapter-not-loaded")
def adapter_not_loaded(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's FSDP engine builds an adapter where the rank is above 0, and loads one nowhere else."""
    setting = "actor_rollout_ref.model.lora_adapter_path"
    if OmegaConf.select(config, setting) and lora_rank(config) == 0 and engines(config)[0].strategy in FSDP:
        problem = "lora_rank is 0: the adapter is never loaded, and the whole model is trained"
        remedy = "Set actor_rollout_ref.model.lora_rank to the adapter's rank."
        yield Fault(setting, problem, "null, or a lora_rank above 0", remedy)


@rule("setting-moved")
def legacy_rewards(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl has kept these blocks, and its main_ppo reads another: a reward function there is silently not used."""
    yield from legacy(config)
