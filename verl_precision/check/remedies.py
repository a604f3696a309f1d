"""Remedies that do not ask for a preset that is chosen already."""

import re
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.rules.rule import Fault
from verl_precision.presets import preset_groups

_NAMED = re.compile(r"(?<![\w.])(\w+)=(\w+(?:(?:, | or )\w+)*)")  # precision=fp16, or estimator=one, another or a third


def without_chosen(fault: Fault, config: DictConfig) -> Fault:
    """Return a fault whose remedy leaves out each way that asks for a preset that is chosen.

    There it has not helped: the command, or the recipe, replaces a part of what the preset sets. Remedies are ways,
    separated by `, or `.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    chosen = {group: choices[group] for group in preset_groups() if choices.get(group)}
    ways = fault.remedy.rstrip(".").split(", or ")
    asking = {way: asked for way in ways if (asked := _asked(way, chosen))}
    if not asking:
        return fault
    left, preset = [way for way in ways if way not in asking], next(iter(asking.values()))
    words = (word.lstrip("+").partition("=")[0] for word in OmegaConf.select(config, "hydra.overrides.task") or ())
    if fault.setting in words:
        left.insert(0, f"Leave out {fault.setting}, which replaces a part of {preset}")
    remedy = ", or ".join(left or [f"{preset} is chosen: leave out the words that replace what it sets"])
    return replace(fault, remedy=f"{remedy if '=' in remedy.split()[0] else remedy[0].upper() + remedy[1:]}.")


def _asked(way: str, chosen: dict[str, str]) -> str:
    """Return the preset, among those chosen, that a way asks for; empty if it asks for none."""
    for group, name in chosen.items():
        named = (re.split(", | or ", names) for key, names in _NAMED.findall(way) if key == group)
        if f"a {group} preset" in way or any(name in each for each in named):
            return f"{group}={name}"
    return ""
