"""All rules, and the function that asks them."""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import sentence
from verl_precision.base.extensions import installed
from verl_precision.check import rules
from verl_precision.check.remedies import without_chosen
from verl_precision.check.rules.presets import one_for_a_cause
from verl_precision.check.rules.rule import RULES, Environment, Fault, Rule
from verl_precision.check.rules.run import made_by_a_script

# Every module of the folder adds its rules to `RULES` when it is imported.
for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    if _module.name != __name__:
        importlib.import_module(_module.name)
for _point in installed("rules"):  # modules of what is installed beside the plugin
    _point.load()

# Of these rules of a machine: what was read in a file that is here holds wherever the run is.
READ_IN_FILES = ("column-missing", "batch-exceeds-data", "epochs-end-first", "reward-function-missing")
ABSENT = ("model-missing", "files-missing")  # a path that is not here is why something is unknown: one cause


def find_faults(config: DictConfig, environment: Environment, this_machine: bool = True) -> list[Fault]:
    """Ask every rule; return the faults: errors, warnings, what could not be looked at.

    The config has Hydra's own node where a precision preset names two dtypes. Unless the run starts on this machine,
    faults of this machine are warnings, but for a model that is not there and that no recipe's script makes. Where the
    run is for another machine (`environment.elsewhere`), they are not faults: that machine could not be looked at.
    """
    ask = partial(_ask, environment=environment, this_machine=this_machine)
    faults = [without_chosen(fault, config) for fault in one_for_a_cause(config, ask(config), ask)]
    return sorted(faults, key=lambda fault: fault.rank)


def _ask(config: DictConfig, environment: Environment, this_machine: bool) -> list[Fault]:
    faults: list[Fault] = []
    missed: list[tuple[str, str]] = []  # an unknown field, and the subject of a rule that asked for it
    for rule in RULES:
        found, fields = rule.answer(config, environment)
        if rule.of_machine and not this_machine:
            found = [_of_this_machine(fault, rule, config, environment.elsewhere) for fault in found]
        faults += found
        missed += [(field, rule.about or rule.name) for field in fields]
    told = list(_unchecked(config, environment, missed))
    unsaid, named = {each.setting for each in told}, {each.setting for each in faults if each.name in ABSENT}
    if environment.elsewhere and not this_machine:
        faults = [each for each in faults if each.name not in ABSENT or each.setting not in unsaid]
    else:
        told = [each for each in told if each.setting not in named]
    return [*told, *faults]


def _of_this_machine(fault: Fault, rule: Rule, config: DictConfig, elsewhere: str) -> Fault:
    """Return a fault of the machine at hand as it counts where a config is only checked there."""
    if elsewhere and rule.name not in READ_IN_FILES:
        problem = f"{fault.problem} The run is for another machine ({elsewhere}), which could not be looked at."
        remedy = f"Check again on that machine. There: {fault.remedy}"
        return replace(fault, severity="unchecked", problem=problem, remedy=remedy)
    if fault.severity != "error" or (rule.name == "model-missing" and not made_by_a_script(config)):
        return fault
    return replace(fault, severity="warning")


def _unchecked(config: DictConfig, environment: Environment, missed: Sequence[tuple[str, str]]) -> Iterator[Fault]:
    """Yield one finding for each unknown thing that a rule has asked for, with the subjects of these rules."""
    for unknown in environment.unknown:
        asking = [subject for field, subject in missed if field in unknown.fields]
        if subjects := list(dict.fromkeys((*unknown.subjects, *asking))):
            value = OmegaConf.select(config, unknown.setting) if unknown.value is None else unknown.value
            problem = sentence(f"{unknown.why}. Not looked at: {', '.join(subjects)}")
            yield Fault(
                unknown.setting, problem, "", unknown.remedy, value=value, severity="unchecked", name=unknown.name
            )
