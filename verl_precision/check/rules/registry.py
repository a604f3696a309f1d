"""All rules, the function that applies them, and one finding for each word of the command that wins over a preset.

The rules of presets find parts without effect, because a word of the command or another loss wins.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.extensions import features_asked_for
from verl_precision.base.files import table_of
from verl_precision.check import rules
from verl_precision.check.rules.gpu_memory import OF_GPU
from verl_precision.check.rules.rule import RULES, Environment, Fault, Rule, Severity, rule
from verl_precision.check.rules.run import made_by_a_script
from verl_precision.check.who_decides import WIN, put_presets_over_words, shown, winning_words
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.presets import preset_groups

# Every module of the folder adds its rules to `RULES` when it is imported.
for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    if _module.name != __name__:
        importlib.import_module(_module.name)

# These findings come first, because with them no run works at all; all others are in the order of names.
FIRST = ("plugin-not-loaded", "verl-refuses", "value-out-of-range", "name-unknown", "model-missing", "not-exact")
ABSENT = ("model-missing", "files-missing")  # a missing path makes facts unknown: one cause
# Settings whose rules are beside the plugin, in the tool that acts on the setting.
PROMISED = (
    "mismatch.alarm.on_alarm:rescue",
    "actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base",
    *(f"{ARITHMETIC_SETTING}:{arithmetic}" for arithmetic in ("exact", "rounded_once")),
    "weight_sync.rounding:stochastic",
)
NAME = "preset-overruled"
OF_PRESETS = (NAME, "preset-not-in-force")
MEANT = " If you want this, add +presets=yield."
_EFFECTS: list[tuple[str, Severity, str]] = table_of(__file__, "effects.yaml")


def find_faults(config: DictConfig, environment: Environment, this_machine: bool = True) -> list[Fault]:
    """Apply every rule; return the faults: errors, warnings, unchecked facts.

    The config needs Hydra's own node if a precision preset names two dtypes. Unless the run starts on this machine,
    faults of this machine are warnings, except a missing model that no recipe's script makes. If the run is for another
    machine (`environment.elsewhere`), they are unchecked facts, because that machine was not looked at.

    Raises:
        ConfigurationError: If the rules of a setting that is in use are not installed beside the plugin.
    """
    features_asked_for("rules", partial(OmegaConf.select, config), PROMISED)  # each adds its rules as it is imported
    ask = partial(_ask, environment=environment, this_machine=this_machine)
    faults = [without_chosen(fault, config) for fault in one_for_a_cause(config, ask(config), ask)]
    return sorted(faults, key=lambda fault: fault.rank)


def _ask(
    config: DictConfig, names: Collection[str] = (), *, environment: Environment, this_machine: bool
) -> list[Fault]:
    """Return the faults of the rules with these names, or of all rules."""
    faults: list[Fault] = []
    for each in sorted(RULES, key=lambda of: (of.name not in FIRST, of.name)):
        if not names or each.name in names:
            found = each.answer(config, environment)
            if each.of_machine and not this_machine:
                found = [_of_this_machine(fault, each, config, environment.elsewhere) for fault in found]
            faults += found
    if any(_refuses_the_loss(each) for each in faults):  # its setting must be corrected first
        faults = [each for each in faults if each.name != "loss-unusable"]
    told, absent = environment.unknown, {each.setting for each in faults if each.name in ABSENT}
    if environment.elsewhere and not this_machine:
        unsaid = {each.setting for each in told}
        return [*told, *(each for each in faults if each.name not in ABSENT or each.setting not in unsaid)]
    return [*(each for each in told if each.setting not in absent), *faults]


def _refuses_the_loss(fault: Fault) -> bool:
    places = ("actor_rollout_ref.actor", "algorithm.rollout_correction")
    others = fault.name not in ("loss-unusable", OF_GPU)  # too little GPU memory refuses no run
    return fault.severity == "error" and others and fault.setting.startswith(places)


def _of_this_machine(fault: Fault, rule: Rule, config: DictConfig, elsewhere: str) -> Fault:
    """Return a fault of this machine, with its severity if the config is only checked on this machine."""
    if elsewhere:
        problem = f"{fault.problem} The run is for another machine ({elsewhere}), so this check did not look at it."
        remedy = f"Check again on that machine. There: {fault.remedy}"
        return replace(fault, severity="unchecked", problem=problem, remedy=remedy)
    if fault.severity != "error" or (rule.name == "model-missing" and not made_by_a_script(config)):
        return fault
    return replace(fault, severity="warning")


@rule(NAME, "warning")
def preset_overruled(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Hydra lets words of the command win over presets, without a message."""
    wins = OmegaConf.select(config, WIN)
    found = [each for each in winning_words(config) if each.contradicts] if wins is not False else []
    if wins and found:  # they were not replaced
        given = " ".join(dict.fromkeys(each.word for each in found))
        yield Fault.worded("preset-overruled/multirun", WIN, severity="error", given=given)
        return
    for each in found:
        fits = ((how, what) for end, how, what in _EFFECTS if re.search(rf"(^|\.)({end})$", each.setting))
        severity, effect = next(fits)
        word = "the command's word" if each.word.lstrip("+").startswith(f"{each.setting}=") else shown(each.word)
        problem = f"{word} wins over {each.preset}, which has {each.wanted}: {effect}"
        remedy = f"Leave out {shown(each.word)}, or add +presets=win.{MEANT}"
        allowed = f"{each.wanted}, the preset's"
        yield Fault(each.setting, problem, allowed, remedy, value=each.value, severity=severity)


@rule(OF_PRESETS[1])
def distilled(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Distillation puts a loss of its own in place of the estimator's, or beside it."""
    choice = OmegaConf.select(config, "hydra.runtime.choices.estimator")
    distillation = config.get("distillation") or {}
    loss = distillation.get("distillation_loss") or {}
    tasks, gradient = loss.get("use_task_rewards", True), loss.get("use_policy_gradient", False)
    if not choice or not distillation.get("enabled") or OmegaConf.select(config, WIN) is False:
        return
    setting, kind = "distillation.enabled", f"the divergence {loss.get('loss_mode')} to a teacher"
    if gradient:
        setting = "distillation.distillation_loss.use_policy_gradient"
        kind = f"a policy gradient towards a teacher with verl's {loss.get('policy_loss_mode')}"
    problem = f"verl trains {kind}, {'beside' if tasks else 'and not'} the loss of estimator={choice}"
    remedy = f"Leave out the distillation, or the estimator.{MEANT}"
    severity: Severity = "warning" if tasks and not gradient else "error"
    yield Fault(setting, problem, "False", remedy, severity=severity)


def one_for_a_cause(
    config: DictConfig, faults: list[Fault], ask: Callable[[DictConfig, Collection[str]], list[Fault]]
) -> Iterator[Fault]:
    """Yield the faults of a config, with one fault for each word that wins over a preset, and without its consequences.

    A consequence is a fault that is gone if the presets win: the rules that found faults are applied again to such a
    config. A fault of the word's own setting describes the effect better: it is joined with the word's fault.
    """
    words = {each.setting: each for each in faults if each.name == NAME and each.setting != WIN}
    if not words:
        yield from faults
        return
    worst = min(each.rank for each in words.values())
    found = {each.name for each in faults} - {NAME}
    put_presets_over_words(changed := deepcopy(config))
    left = {(each.name, each.setting) for each in ask(changed, found)} if found else set()
    for fault in faults:
        others = [each for each in faults if each.setting == fault.setting and each.name != NAME]
        if fault.name == NAME:
            yield _joined(fault, min(others, key=lambda each: each.rank)) if others else fault
        elif fault.severity == "unchecked" or (fault.setting not in words and fault.rank < worst):
            yield fault
        elif fault.setting not in words and (fault.name, fault.setting) in left:
            yield fault


def _joined(word: Fault, other: Fault) -> Fault:
    """Return the graver of two faults of one setting, with both problems and the remedy of the word."""
    graver = min(other, word, key=lambda each: each.rank)
    problem = f"{word.problem.rpartition(': ')[0]}: {other.problem}"
    remedy = word.remedy if graver is word else word.remedy.partition(MEANT)[0]  # the other rule refuses it anyway
    return replace(graver, problem=problem, remedy=remedy)


def without_chosen(fault: Fault, config: DictConfig) -> Fault:
    """Return a fault whose remedy names no chosen preset, because something replaces a part of that preset."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    for group in preset_groups():
        asks = rf"a {group} preset|(?<![\w.]){group}=(\w+(, | or ))*{choices.get(group)}\b"
        if group in choices and re.search(asks, fault.remedy):
            name = f"{group}={choices[group]}"
            return replace(fault, remedy=f"Leave out {fault.setting}, or what else replaces a part of {name}.")
    return fault
