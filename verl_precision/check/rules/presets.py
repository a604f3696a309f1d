"""Rules of the presets: parts without effect, because an option of the command or another loss wins."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_precision.check.rules.rule import Environment, Fault, Severity, rule
from verl_precision.check.winning_words import WIN, shown, winning_words, with_presets_winning
from verl_precision.presets import preset_groups

NAME = "preset-overruled"
OF_PRESETS = (NAME, "preset-not-in-force")
MEANT = " If you want this, add +presets=yield."
# What follows where a word wins: end of the setting's path, how serious it is, in a few words. The first that fits.
_EFFECTS: tuple[tuple[str, Severity, str], ...] = (
    (r"policy_loss\.loss_mode", "error", "another loss is trained, and the preset's loss is not used"),
    (r"bypass_mode", "error", "the ratio has another denominator"),
    (r"algorithm\.rollout_correction(\.\w+)?", "error", "the loss gets other rollout weights"),
    (r"adv_estimator|norm_adv_by_std_in_grpo", "error", "another advantage is trained"),
    (r"worker_extension_cls|send_weight_manifest", "warning", "the weight-sync guard is off"),
    (r"fsdp(_config)?\._target_", "warning", "this package's engine is off, and with it the weight-sync guard"),
    (r"use_kl_loss|use_kl_in_reward|kl_\w+", "warning", "the KL term is another one"),
    (r"entropy_coeff", "warning", "the entropy term is another one"),
    (r"loss_agg_mode|loss_scale_factor", "warning", "tokens and responses get other weights"),
    (r"clip_ratio\w*|rollout_is_threshold|rollout_rs_threshold", "warning", "the loss clips at other bounds"),
    (r"\w*dtype", "warning", "this part computes in another dtype"),
    (r"\w+", "warning", "this part of the preset has no effect"),
)


@rule(NAME, "warning")
def preset_overruled(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Hydra lets words of the command win over presets, and says nothing of it."""
    wins = OmegaConf.select(config, WIN)
    found = [each for each in winning_words(config) if each.contradicts] if wins is not False else []
    if wins and found:  # they were not replaced
        problem = "with Hydra's multirun, presets cannot replace words of the command"
        remedy = f"Start the runs one by one, or leave out {' '.join(dict.fromkeys(each.word for each in found))}."
        yield Fault(WIN, problem, "a single run", remedy, severity="error")
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
    remedy = f"Leave out the distillation, or estimator={choice}.{MEANT}"
    severity: Severity = "warning" if tasks and not gradient else "error"
    yield Fault(setting, problem, "False", remedy, severity=severity)


def one_for_a_cause(
    config: DictConfig, faults: list[Fault], ask: Callable[[DictConfig, Collection[str]], list[Fault]]
) -> Iterator[Fault]:
    """Yield the faults of a config, but one for each word that wins over a preset, and none for what follows from it.

    What follows is what is gone where the presets win; of that the rules that found something are asked again. Another
    rule that blames the word's own setting knows the effect better: the two become one.
    """
    words = {each.setting: each for each in faults if each.name == NAME and each.setting != WIN}
    if not words:
        yield from faults
        return
    worst = min(each.rank for each in words.values())
    found = {each.name for each in faults} - {NAME}
    left = {(each.name, each.setting) for each in ask(with_presets_winning(config), found)} if found else set()
    for fault in faults:
        others = [each for each in faults if each.setting == fault.setting and each.name != NAME]
        if fault.name == NAME:
            yield _joined(fault, min(others, key=lambda each: each.rank)) if others else fault
        elif fault.severity == "unchecked" or (fault.setting not in words and fault.rank < worst):
            yield fault
        elif fault.setting not in words and (fault.name, fault.setting) in left:
            yield fault


def _joined(word: Fault, other: Fault) -> Fault:
    """Return the graver of two faults of one setting, which says both, with the remedy of the word."""
    graver = min(other, word, key=lambda each: each.rank)
    problem = f"{word.problem.rpartition(': ')[0]}: {other.problem}"
    remedy = word.remedy if graver is word else word.remedy.partition(MEANT)[0]  # the other rule refuses it anyway
    return replace(graver, problem=problem, remedy=remedy)


def without_chosen(fault: Fault, config: DictConfig) -> Fault:
    """Return a fault whose remedy leaves out each way that asks for a preset that is chosen.

    There it has not helped: the command, or the recipe, replaces a part of what the preset sets. Remedies are ways,
    separated by `, or `.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    ways = fault.remedy.rstrip(".").split(", or ")
    for group, name in ((group, choices[group]) for group in preset_groups() if choices.get(group)):
        asks = re.compile(rf"a {group} preset|(?<![\w.]){group}=(\w+(, | or ))*{name}\b")
        if (left := [way for way in ways if not asks.search(way)]) == ways:
            continue
        words = (word.lstrip("+").partition("=")[0] for word in OmegaConf.select(config, "hydra.overrides.task") or ())
        if fault.setting in words:
            left.insert(0, f"Leave out {fault.setting}, which replaces a part of {group}={name}")
        remedy = ", or ".join(left or [f"{group}={name} is chosen: leave out the words that replace what it sets"])
        return replace(fault, remedy=f"{remedy if '=' in remedy.split()[0] else remedy[0].upper() + remedy[1:]}.")
    return fault
