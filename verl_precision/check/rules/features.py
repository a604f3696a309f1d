"""Features that the trainer or the hosts do not provide: mains with other trainers, host symbols that have changed.

Other mains were run on a CPU with verl 0.9.1: docs/versions.md, Mains.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base import verl_config
from verl_precision.base.files import table_of
from verl_precision.check.keys import TABLE_OF_KEYS, keys_of, unread_word
from verl_precision.check.rules.rollout import MASKS, replays_masks
from verl_precision.check.rules.rule import Environment, Fault, fault_of_error, rule
from verl_precision.check.rules.tables import names_in
from verl_precision.integration.ledger import CORE, REMEDY
from verl_precision.integration.trainer.saving import every_minutes, saves
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

ALARM = "mismatch.alarm.on_alarm"
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
WITHOUT_PARTS = "main-without-parts"
# verl 0.9.1's `_compute_advantage` does not select their inputs: greedy rewards, sums of squares, rewards by parts.
NOT_GIVEN = ("remax", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo")
_INSTEAD = "Start verl.trainer.main_ppo, with trainer.v1.trainer_mode=separate_async where the rollout has its own GPUs"
# Feature -> setting, what to do without it, severity.
FEATURES: dict[str, tuple[str, str, Any]] = table_of(__file__)


@rule(WITHOUT_PARTS, "warning")
def parts_of_a_main(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """This package changes verl's V1 trainer: without it there are no mismatch metrics and no canary."""
    main = verl_config.other_trainer(config)
    if main is None or not OmegaConf.select(config, "mismatch.enabled"):  # no preset is chosen
        return
    yield Fault.worded(WITHOUT_PARTS, "mismatch.enabled", main=main, instead=_instead(main))


@rule("main-lacks-part")
def asked_of_a_main(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Settings for verl's V1 trainer have no effect in a main with another trainer, and no message says so."""
    if (main := verl_config.other_trainer(config)) is None:
        return
    replayed = OmegaConf.select(config, REPLAY) in ("R2", "R3")
    asked = {
        ALARM: OmegaConf.select(config, ALARM, default="log") != "log",
        "checkpoint.every_minutes": every_minutes(config) > 0 and (config.trainer.save_freq or 0) <= 0,
        verl_config.SEEDED: verl_config.is_repeatable(config),
        MASKS: bool(OmegaConf.select(config, MASKS)),
        REPLAY: replayed and main != "trainer.use_v1=False",
    }
    for setting in (setting for setting, is_asked in asked.items() if is_asked):
        yield Fault.worded("main-lacks-part", setting, main=main, instead=_instead(main))


def _instead(main: str) -> str:
    return "Set trainer.use_v1=True" if main.startswith("trainer.") else _INSTEAD


@rule("advantage-not-computed")
def advantage_not_computed(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """An advantage estimator whose inputs the V1 trainer does not pass fails in the first step."""
    name = str(config.algorithm.adv_estimator)
    if config.trainer.get("use_v1", True) and name in NOT_GIVEN:
        yield Fault.worded("advantage-not-computed", "algorithm.adv_estimator", name=name)


@rule("adapter-not-loaded")
def adapter_not_loaded(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's FSDP engine loads an adapter only if lora_rank is above 0."""
    setting, actor = "actor_rollout_ref.model.lora_adapter_path", verl_config.engines(config)[0]
    named = OmegaConf.select(config, setting) is not None
    if named and verl_config.lora_rank(config) == 0 and actor.strategy in verl_config.FSDP:
        yield Fault.worded("adapter-not-loaded", setting)


@rule("setting-moved")
def legacy_rewards(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl still has these blocks, but its main_ppo reads others: a reward function here is silently not used."""
    for block in {old.partition(".")[0]: None for old in TABLE_OF_KEYS["unread"]}:
        node: Any = OmegaConf.to_container(config.get(block) or OmegaConf.create(), resolve=False)
        for key in keys_of(node, f"{block}."):
            value = OmegaConf.select(config, key)
            if not isinstance(value, DictConfig) and (error := unread_word(config, key, value)) is not None:
                yield fault_of_error(error)


def asked_features(config: DictConfig) -> list[str]:
    """Return the features that a config turns on."""
    setting = {name: partial(OmegaConf.select, config, row[0]) for name, row in FEATURES.items() if row[0]}
    on_cpu, all_engines = config.trainer.device == "cpu", verl_config.engines(config)
    ours = mode if (mode := verl_config.trainer_to_start(config)) in FEATURES else ""
    canary = bool(ours) and setting["canary"](default=1) != 0
    guarded = str(setting["weight_sync"]()).startswith("verl_precision.")
    shadow = setting["shadow"]() or {}
    is_sorted = OmegaConf.select(config, verl_config.BUFFER) == "SortedReplayBuffer"
    asked = {
        CORE: True,
        "cpu": on_cpu,
        "speed on cpu": on_cpu,
        "loss_scale": any(each.our_fsdp and each.trains and each.compute == "fp16" for each in all_engines),
        "shadow": shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow",
        "megatron": any(each.strategy == "megatron" and each.ours for each in all_engines),
        "lora.merge": verl_config.lora_is_merged(config) and all_engines[0].our_fsdp,
        "arithmetic": setting["arithmetic"](default="native") != "native",
        "router_replay": on_cpu and setting["router_replay"](),
        "rollout_is=vp_*": setting["rollout_is=vp_*"]() in WEIGHT_KINDS,
        "adv_estimator=rloo": ours and config.algorithm.adv_estimator == "rloo" and _own_loops(config),
        "repeatable": verl_config.is_repeatable(config) or is_sorted,
        "vp_single_turn": setting["vp_single_turn"]() == verl_config.AGENT_LOOP,
        "sampling_masks": replays_masks(config),
        "rewards": str(setting["rewards"]()).endswith((".boxed_answer", ".answer_tag")),
        "weight_sync": guarded,
        "vp_gloo": setting["vp_gloo"]() == verl_config.GLOO,
        "weight_sync on accelerators": guarded and not on_cpu,
        "weight_sync of adapters": guarded and verl_config.uses_adapter(config),
        "canary": canary,
        "logger=file": ours and "file" in names_in(config, "trainer.logger"),
        "SIGTERM": ours and saves(config),
    }
    asked |= {ours: True, f"canary in {ours}": canary} if ours else {}
    return [name for name, is_asked in asked.items() if is_asked]


def _own_loops(config: DictConfig) -> bool:
    """Return whether an agent loop may return several outputs a session; verl's loops and ours return one."""
    agent = config.actor_rollout_ref.rollout.agent
    known = ("single_turn_agent", "tool_agent", verl_config.AGENT_LOOP)
    return agent.default_agent_loop not in known or agent.get("agent_loop_config_path") is not None


@rule("feature-lost")
def lost_features(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A symbol of verl or vLLM differs, although the version is in the tested range: its feature would fail."""
    for name, lost in environment.lost.items():
        setting, without, severity = FEATURES[name]
        lacks = "; ".join(f"{symbol} {wrong}" for symbol, wrong in lost.items())
        said = f"{REMEDY}, or leave it out: {without}."
        yield Fault.worded("feature-lost", setting, severity=severity, name=name, lacks=lacks, remedy=said)
