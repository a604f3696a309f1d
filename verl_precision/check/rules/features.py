"""Features of a config that the installed verl or vLLM cannot provide: a symbol of the ledger has changed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import (
    AGENT_LOOP,
    BUFFER,
    engines,
    is_repeatable,
    lora_is_merged,
    trainer_to_start,
    uses_adapter,
)
from verl_precision.check.rules.files import names_in
from verl_precision.check.rules.rollout import replays_masks
from verl_precision.check.rules.rule import Environment, Fault, rule
from verl_precision.integration.ledger import CORE, REMEDY
from verl_precision.integration.trainer.saving import saves
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

# Feature -> setting, what to do without it, severity.
FEATURES: dict[str, tuple[str, str, Any]] = table_of(__file__)


def asked_features(config: DictConfig) -> list[str]:
    """Return the features that a config asks for."""
    setting = {name: partial(OmegaConf.select, config, row[0]) for name, row in FEATURES.items() if row[0]}
    on_cpu, mode, all_engines = config.trainer.device == "cpu", trainer_to_start(config), engines(config)
    ours = mode if mode in FEATURES else ""
    canary = bool(ours) and setting["canary"](default=1) != 0
    guarded = str(setting["weight_sync"]()).startswith("verl_precision.")
    shadow = setting["shadow"]() or {}
    asked = {
        CORE: True,
        "cpu": on_cpu,
        "speed on cpu": on_cpu,
        "loss_scale": any(each.our_fsdp and each.trains and each.compute == "fp16" for each in all_engines),
        "shadow": shadow.get("every_n_steps") or shadow.get("ratio_source") == "shadow",
        "megatron": any(each.strategy == "megatron" and each.ours for each in all_engines),
        "lora.merge": lora_is_merged(config) and all_engines[0].our_fsdp,
        "arithmetic": setting["arithmetic"](default="native") != "native",
        "router_replay": on_cpu and setting["router_replay"](),
        "rollout_is=vp_*": setting["rollout_is=vp_*"]() in WEIGHT_KINDS,
        "adv_estimator=rloo": ours and config.algorithm.adv_estimator == "rloo" and _own_loops(config),
        "repeatable": is_repeatable(config) or OmegaConf.select(config, BUFFER) == "SortedReplayBuffer",
        "vp_single_turn": setting["vp_single_turn"]() == AGENT_LOOP,
        "sampling_masks": replays_masks(config),
        "rewards": str(setting["rewards"]()).endswith((".boxed_answer", ".answer_tag")),
        "weight_sync": guarded,
        "weight_sync on accelerators": guarded and not on_cpu,
        "weight_sync of adapters": guarded and uses_adapter(config),
        "canary": canary,
        "logger=file": ours and "file" in names_in(config, "trainer.logger"),
        "SIGTERM": ours and saves(config),
    }
    asked |= {ours: True, f"canary in {ours}": canary} if ours else {}
    return [name for name, is_asked in asked.items() if is_asked]


def _own_loops(config: DictConfig) -> bool:
    """Whether there may be agent loops that return several outputs a session, which none of verl's nor ours does."""
    agent = config.actor_rollout_ref.rollout.agent
    known = ("single_turn_agent", "tool_agent", AGENT_LOOP)
    return agent.default_agent_loop not in known or agent.get("agent_loop_config_path") is not None


@rule("feature-lost")
def lost_features(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The hosts are in the tested range, and one of their symbols is not: what needs it would break, or not come."""
    for name, lost in environment.lost.items():
        setting, without, severity = FEATURES[name]
        problem = f"{name} is not available: {'; '.join(f'{symbol} {wrong}' for symbol, wrong in lost.items())}"
        remedy = f"{REMEDY}, or leave it out: {without}."
        yield Fault(setting, problem, "verl and vLLM as they were tested", remedy, severity=severity)
